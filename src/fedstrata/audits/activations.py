"""Texts from what passes through the cut of split learning: hidden states of every batch, and gradients."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from fedstrata.audits.figures import Figure, Floats, Truth, best_threshold, detection, share
from fedstrata.audits.finding import Finding, View, read_words
from fedstrata.audits.first_layer import Matrix, candidates, text_types
from fedstrata.audits.play import OUTPUTS, Played, flat
from fedstrata.audits.probes import Nearest, network_reader, ridge_reader
from fedstrata.audits.texts import States, places_of, scored
from fedstrata.models.checkpoints import max_positions
from fedstrata.models.cut import cut_at
from fedstrata.tasks import Batch
from fedstrata.wire.activations import GRADIENTS, STATES, decode_states
from fedstrata.wire.stream_ends import server_end

MOST = 20_000
"""Hidden states of the client that are read."""
SAMPLE = 2048
"""Tokens over whose vectors a mean is taken."""
STEP = 0.01
"""Length of a step along the gradient, as a share of the hidden state's."""


def attack(view: View) -> list[Finding]:
    """The tokens of every batch; of masked ones the place and the word; of a classifier's every label."""
    found = _tokens(view)
    if any(seen.batch.positions is not None for seen in view.client.seen):
        found += _masked(view)
    elif view.bench.data.labels is not None and _at_server(view):
        found.append(_classes(view))
    return found


def _tokens(view: View) -> list[Finding]:
    bench = view.bench
    states, public = (_states(view, played) for played in (view.client, view.shadow))
    states = states.first(int(np.searchsorted(np.cumsum(states.lengths), MOST, side="right")) or 1)
    table = flat(bench.start)[bench.parts.words]
    readings = {
        "nearest embedding": _nearest(view, states),
        "ridge probe": ridge_reader(public.rows, public.tokens, table)(states.rows),
        "trained inverter": network_reader(public.rows, public.tokens, table)(states.rows),
    }
    found = []
    for how, guessed in readings.items():
        figures = scored(bench, states, guessed)
        hits, cases = figures["tokens"].count
        read = f"{hits:,} of {cases:,} tokens at their places ({how})"
        sentence = f"from the hidden states of batches the server reads {read}"
        found.append(Finding("activations", how, view.setting, figures, sentence))
    return found


def _messages(view: View, played: Played, what: str) -> Iterator[torch.Tensor]:
    """What came in messages of one kind, ``[n, H]`` each, as the server decodes it."""
    bench, train = view.bench, played.train
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        end = server_end(
            form=bench.ready.runtime.stream,
            width=bench.parts.hidden,
            longest=max_positions(bench.ready.loaded.model),
            texts=train.batch_size,
            folder=Path(folder),
            room=train.feature_cache_bytes,
        )
        for kind, message in played.stream:
            if kind == STATES:
                rows, _ = end.receive_states(message)
                if what == STATES:
                    yield rows.float()
            elif kind == what == GRADIENTS:
                yield end.receive_gradients(message).float()
        end.close()


def _states(view: View, played: Played) -> States:
    rows = torch.cat(list(_messages(view, played, STATES)))
    lengths = np.concatenate([m["lengths"].numpy() for kind, m in played.stream if kind == STATES])
    lengths = lengths.astype(np.int64)
    return States(rows, _shown(played), places_of(lengths), lengths)


def _shown(played: Played) -> torch.Tensor:
    """The tokens as the model saw them, without padding, ``[N]``."""
    inputs = [seen.batch.inputs for seen in played.seen]
    return torch.cat([own["input_ids"][own["attention_mask"] > 0] for own in inputs])


def _nearest(view: View, states: States) -> torch.Tensor:
    """For each state the token whose vector at that place, as it enters the lowest layer, is the nearest."""
    bench, positions = view.bench, int(states.lengths.max())
    into = Matrix(f"{bench.parts.stack}.0.weight", False)  # the layer itself: its input
    sample = torch.from_numpy(np.unique(np.linspace(0, bench.vocabulary - 1, SAMPLE).astype(np.int64)))
    kinds = text_types(bench)
    chunks = (chunk for kind in kinds for chunk in candidates(bench, into, positions, sample, kind))
    total = torch.stack([chunk.sum(0) for chunk in chunks]).sum(0)
    search = Nearest(states.rows, states.places, total / len(sample) / len(kinds))
    for kind in kinds:
        search.seen = 0
        for chunk in candidates(bench, into, positions, torch.arange(bench.vocabulary), kind):
            search.take(chunk)
    return search.best


def _masked(view: View) -> list[Finding]:
    """Places by the size of the gradient, words by what the head would have to hear to send it back."""
    sizes, shadow = (_sizes(view, played) for played in (view.client, view.shadow))
    true, shadow_true = (_predicted(played) for played in (view.client, view.shadow))
    figures = detection(sizes, true, best_threshold(shadow, shadow_true))
    what = "masked" if view.bench.job.task.kind == "mlm" else "predicted"
    sentence = f"from the gradients the server {read_words(figures, f'{what} places')}"
    found = [Finding("gradients", "size", view.setting, figures, sentence)]
    if not _at_server(view):
        return found
    words = _words(view)
    hits, cases = words["tokens"].count
    sentence = f"from the first batch's gradients the server reads {hits:,} of {cases:,} {what} words"
    return [*found, Finding("gradients", "head's answer", view.setting, words, sentence)]


def _sizes(view: View, played: Played) -> Floats:
    sizes: Floats = torch.cat(list(_messages(view, played, GRADIENTS))).norm(dim=1).double().numpy()
    return sizes


def _predicted(played: Played) -> Truth:
    """Which tokens, padding left out, were to be predicted, ``[N]``."""
    batches = [seen.batch for seen in played.seen]
    return torch.cat([b.positions[b.inputs["attention_mask"] > 0] for b in batches]).numpy()  # type: ignore[index]


class _Given(torch.nn.Module):
    """Stands for the server's layers and gives what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return self.hidden


def _at_server(view: View) -> bool:
    """Whether the head stands right above the server's layers: a client's own mix the places' gradients."""
    plan = view.client.plan
    return view.bench.parts.layer(plan.layers[-1]) in plan.server


def _words(view: View) -> dict[str, Figure]:
    """The words of the first batch's masked places."""
    batch = view.client.seen[0].batch
    assert isinstance(batch.positions, torch.Tensor)
    read = next(_answers(view, [batch.positions[batch.inputs["attention_mask"] > 0]]))
    right = int((read == batch.targets).sum())
    commonest = int(view.bench.frequencies.argmax())
    chance = float((batch.targets == commonest).float().mean()) if len(read) else 0.0
    return {"tokens": share(right, len(read), chance)}


def _classes(view: View) -> Finding:
    """The class of every text, or of every word that has one; chance is naming the commonest of them."""
    sizes = (rows.norm(dim=1) for rows in _messages(view, view.client, GRADIENTS))
    labels = [_labels(seen.batch, size) for seen, size in zip(view.client.seen, sizes, strict=True)]
    read = torch.cat(list(_answers(view, [own >= 0 for own in labels])))
    true = torch.cat([own[own >= 0] for own in labels])
    commonest = float(torch.bincount(true).max() / len(true))
    figures = {"labels": share(int((read == true).sum()), len(true), commonest)}
    hits, cases = figures["labels"].count
    sentence = f"from the gradients the server reads {hits:,} of {cases:,} labels, each at its place in its batch"
    return Finding("gradients", "head's answer", view.setting, figures, sentence)


def _labels(batch: Batch, sizes: torch.Tensor) -> torch.Tensor:
    """The class of each token, padding left out, ``[N]``; -1 for none.

    That of a text stands where its gradient is the largest: there, at the first token or the last, the head reads.
    """
    tokens = batch.inputs["attention_mask"] > 0
    placed = torch.full(tokens.shape, -1, dtype=torch.long)
    if batch.targets.ndim == 2:
        placed[:, : batch.targets.shape[1]] = batch.targets
    else:
        every = torch.zeros(tokens.shape).masked_scatter(tokens, sizes)
        placed[torch.arange(len(tokens)), every.argmax(1)] = batch.targets
    return placed[tokens]


def _answers(view: View, places: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Of the first batches what the head was to say: a step against the gradient raises its logit most.

    The server knows its own output at these places, as it sent it, and the head at the begin of the round.

    Args:
        view: what is attacked.
        places: of each batch, at which of its tokens the head reads, ``[N]``.
    """
    bench, plan, form = view.bench, view.client.plan, view.bench.ready.runtime.stream
    sent = (message for what, message in view.client.stream if what == OUTPUTS)
    given = _Given()
    for at, gradients, message in zip(places, _messages(view, view.client, GRADIENTS), sent, strict=False):
        outputs = decode_states(message, len(message[STATES]), bench.parts.hidden, form.states).float()
        outputs = outputs[at] if len(outputs) == len(at) else outputs[: int(at.sum())]  # what the client reads
        back = gradients[at] / gradients[at].norm(dim=1, keepdim=True).clamp_min(1e-30)
        with bench.model() as model, cut_at(model, bench.parts, plan, given):  # type: ignore[arg-type]
            logits = []
            for hidden in (outputs, outputs - STEP * outputs.norm(dim=1, keepdim=True) * back):
                given.hidden = hidden[:, None]
                ids = torch.zeros(len(hidden), 1, dtype=torch.long)
                said = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
                logits.append(said.reshape(len(hidden), -1))
        yield (logits[1] - logits[0]).argmax(1)
