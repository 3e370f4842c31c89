"""Texts from the hidden states of a frozen encoder: one for every token, or one vector for a text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedstrata.audits.figures import area, best_threshold, detection
from fedstrata.audits.finding import Finding, View, read_words
from fedstrata.audits.play import Played, flat
from fedstrata.audits.probes import network_reader, ridge_reader, words_reader
from fedstrata.audits.texts import States, places_of, scored
from fedstrata.exchanges.hidden_states_form import decode_hidden_states
from fedstrata.plan.kinds import Tensors

MOST = 256
"""Texts of the client that are read."""
TOKENS = 60_000
"""Hidden states of public text that readers learn from."""


def attack(view: View) -> list[Finding]:
    """Token by token where every token's state is sent, else the set of a text's words."""
    client, shadow = (_decoded(view, played) for played in (view.client, view.shadow))
    if int(client["tokens"].max()) > 1:
        return _by_token(view, client, shadow)
    return _by_text(view, client, shadow)


def _by_token(view: View, client: Tensors, shadow: Tensors) -> list[Finding]:
    states, public = _states(view.client, client), _states(view.shadow, shadow)
    states = states.first(MOST)
    table = flat(view.bench.start)[view.bench.parts.words]
    rows, tokens = public.rows[:TOKENS], public.tokens[:TOKENS]
    found = []
    for how, make in (("ridge probe", ridge_reader), ("trained inverter", network_reader)):
        figures = scored(view.bench, states, make(rows, tokens, table)(states.rows))
        hits, cases = figures["tokens"].count
        sentence = (
            f"from the hidden states the server reads {hits:,} of {cases:,} tokens at their places ({how}), and "
            "the labels, which are sent with them"
        )
        found.append(Finding("hidden_states", how, view.setting, figures, sentence))
    return found


def _by_text(view: View, client: Tensors, shadow: Tensors) -> list[Finding]:
    """Half of the public texts teach the reader, the other half say from which score on it is believed."""
    true, public = _words(view, view.client)[:MOST], _words(view, view.shadow)
    half = len(public) // 2
    vectors = shadow["features"].flatten(1)
    reader = words_reader(vectors[:half], public[:half].float())
    kept = torch.from_numpy(view.bench.ordinary)
    tried = reader(vectors[half:])[:, kept].double().numpy().ravel()
    threshold = best_threshold(tried, public[half:][:, kept].numpy().ravel())
    scores = reader(client["features"].flatten(1)[:MOST])[:, kept].double().numpy()
    count = round(float(public[:, kept].sum(1).float().mean()))
    guess = np.broadcast_to(view.common(count)[kept.numpy()], scores.shape)
    truth = true[:, kept].numpy()
    figures = detection(scores.ravel(), truth.ravel(), threshold, guess.ravel())
    usual = np.broadcast_to(view.bench.frequencies[kept.numpy()].astype(np.float64), scores.shape)
    chance = area(usual.ravel(), truth.ravel()).value  # which words are common is learned from public text alone
    figures["auc"] = replace(figures["auc"], chance=chance)
    read = read_words(figures, "words of the texts")
    sentence = f"from one vector of each text the server {read}; labels are sent as well"
    return [Finding("hidden_states", "ridge probe", view.setting, figures, sentence)]


def _decoded(view: View, played: Played) -> Tensors:
    """The message as the server decodes it."""
    bench = view.bench
    model, labels = bench.ready.loaded.model, bench.data.labels
    classes = None if labels is None else len(labels)
    return decode_hidden_states(
        played.sent, model.branches, model.config.hidden_size, classes, bench.ready.runtime.dtype
    )


def _states(played: Played, message: Tensors) -> States:
    """The states of every token; of several branches side by side."""
    lengths = message["tokens"].numpy().astype(np.int64)
    ids = np.concatenate([played.examples.tokens[i] for i in played.index]).astype(np.int64)
    return States(message["features"].flatten(1), torch.from_numpy(ids), places_of(lengths), lengths)


def _words(view: View, played: Played) -> torch.Tensor:
    """Which tokens stand in each text, ``[m, V]``."""
    words = torch.zeros(len(played.index), view.bench.vocabulary, dtype=torch.bool)
    for row, example in enumerate(played.index):
        words[row, torch.from_numpy(played.examples.tokens[example].astype(np.int64))] = True
    return words
