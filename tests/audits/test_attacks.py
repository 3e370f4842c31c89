"""Each attack on jobs whose truth is known; and a defence that brings it to chance."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata.audits import activations, embeddings, first_layer, hidden_states
from fedstrata.audits.replay import moved_beyond
from fedstrata.client.feature_cache import FeatureCache
from fedstrata.client.optimizer import step
from fedstrata.plan.disclosure import POOLED
from fedstrata.plan.sharing import EVERYTHING
from fedstrata.plan.streams import Streams
from fedstrata.wire.codec import StateCodec
from tiny import SENTENCES, tiny_model, tokenizer

Audited = Callable[..., dict[str, Any]]
Stage = dict[str, Any]
RAW = {"optimizer": "sgd", "learning_rate": 1e3, "dropout": False, "steps": 1, "batch_size": 2}
"""One step of SGD at a rate that leaves the gradient whole."""


def of(stage: Stage, channel: str, setting: str) -> dict[str, Any]:
    """The first finding of a channel and setting."""
    return next(f for f in stage["findings"] if (f["channel"], f["setting"]) == (channel, setting))


def figures(stage: Stage, channel: str, setting: str, attack: str) -> dict[str, Any]:
    """The figures of one finding."""
    found = (
        f for f in stage["findings"] if (f["channel"], f["setting"], f["attack"]) == (channel, setting, attack)
    )
    return dict(next(found)["figures"])


def test_rows_of_the_embeddings_name_every_token(audited: Audited) -> None:
    """With weight decay and a proximal term, which move every row."""
    train = {"proximal_mu": 5.0, "epochs": 2, "steps": 3, "weight_decay": 0.5}
    stage = audited("fedprox", "classify", train=train)
    for setting in ("1 step, 1 text", "1 step", "3 steps"):
        found = figures(stage, "embeddings", setting, "rows moved")
        assert found["precision"]["value"] == found["recall"]["value"] == 1.0
        assert not found["auc"]["holds_chance"]
        assert figures(stage, "embeddings", setting, "position rows")["recall"]["value"] == 1.0
    assert [play["steps"] for play in stage["plays"]] == [1, 1, 3]


def test_weight_decay_is_no_word_where_epochs_differ_in_their_steps(
    job: Callable[..., dict[str, Any]], public: str
) -> None:
    """Under a budget of tokens, with a rate that falls from epoch to epoch."""
    raw = {"optimizer": "sgd", "learning_rate": 0.01, "weight_decay": 0.5, "lr_decay": 0.5, "epochs": 3}
    made = job("fedavg", "classify", train={**raw, "tokens_per_batch": 24})
    del made["train"]["batch_size"]
    [stage] = fedstrata.audit(made, public=public)["stages"]
    [*_, last] = (finding for finding in stage["findings"] if finding["attack"] == "rows moved")
    assert last["figures"]["precision"]["value"] == last["figures"]["recall"]["value"] == 1.0


def test_weight_decay_is_no_word_in_a_later_round_whose_rates_are_others(audited: Audited) -> None:
    """The rate rises over the run, so that decay moves more in the second round than in the first."""
    table = {"kind": "lora", "rank": 2, "targets": ["word_embeddings"]}
    train = {"weight_decay": 5.0, "warmup_ratio": 0.9, "epochs": 2, "steps": 3}
    stage = audited("fedavg", "classify", adapter=table, train=train, method={"rounds": 4})
    found = figures(stage, "adapters", "3 steps of round 2", "columns moved")
    assert found["precision"]["value"] == found["recall"]["value"] == 1.0


def test_the_tokens_are_those_of_the_texts(audited: Audited) -> None:
    """Counted from the words themselves: client-0's first batch of one text."""
    stage = audited("fedavg", "classify", train={"batch_size": 1, "steps": 1})
    hits, true = figures(stage, "embeddings", "1 step", "rows moved")["recall"]["count"]
    assert hits == true
    assert 6 <= true <= 12


def test_the_decoders_bias_names_the_predicted_words(audited: Audited) -> None:
    found = figures(
        audited("fedbfpt", "mlm", method={"local_layers": 2}), "token_head", "1 step", "decoder bias, raised"
    )
    assert found["precision"]["value"] == found["recall"]["value"] == found["auc"]["value"] == 1.0


def test_without_the_decoders_bias_that_of_the_norm_names_the_predicted_words(audited: Audited) -> None:
    """It moves by the targets' rows in the decoder, which stays where it is."""
    tables = {"method": {"local_layers": 2}, "task": {"mask_probability": 0.3}}
    stage = audited("fedbfpt", "mlm", **tables, privacy={"omit": ["decoder_bias"]}, train={"batch_size": 4})
    found = figures(stage, "token_head", "1 step, 1 text", "norm bias, tuned")
    assert found["auc"]["low"] > 0.6
    assert not any("head: no attack here reads them" in note for note in stage["notes"])


def test_the_classifiers_bias_names_the_classes_and_their_shares(audited: Audited) -> None:
    stage = audited(
        "fedbt", "classify", train={"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 4, "steps": 1}
    )
    found = figures(stage, "class_head", "1 step", "classifier bias")
    assert found["precision"]["value"] == found["recall"]["value"] == 1.0
    assert found["total variation"]["value"] < 0.05 < found["total variation"]["chance"]


def test_a_classifier_without_a_bias_names_the_classes(
    audited: Audited, model_folder: Callable[..., Path]
) -> None:
    stage = audited(
        "fedbt",
        "classify",
        model={"name": str(model_folder("gpt2", head="clm"))},
        train={"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 4, "steps": 1},
    )
    found = figures(stage, "class_head", "1 step", "classifier rows")
    assert found["precision"]["value"] == found["recall"]["value"] == 1.0
    assert not any("head: no attack here reads" in note for note in stage["notes"])


def test_the_classifiers_rows_tell_classes_where_its_bias_does_not_arrive(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_biases(*asked: Any) -> dict[str, torch.Tensor]:
        return {name: t * (t.ndim > 1) for name, t in moved_beyond(*asked).items()}

    monkeypatch.setattr("fedstrata.audits.class_head.moved_beyond", without_biases)
    stage = audited("fedavg", "classify")
    found = [figures(stage, "class_head", "1 step, 1 text", f"classifier {what}") for what in ("bias", "rows")]
    assert [each["auc"]["value"] for each in found] == [0.5, 1.0]


def test_of_a_tied_table_the_largest_changes_alone_tell_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rows have not moved, so there is no usual direction."""
    change = torch.zeros(6, 4)
    change[1, 2], change[4, 0] = 0.5, -0.25
    monkeypatch.setattr(embeddings, "_changes", lambda *_: change)
    view: Any = SimpleNamespace(bench=SimpleNamespace(parts=SimpleNamespace(sharing=EVERYTHING)))
    nothing: Any = None
    assert embeddings._turned(view, nothing, []).tolist() == [0, 0.5, 0, 0, 0.25, 0]


@pytest.mark.parametrize(
    ("name", "kind", "method"),
    [
        ("fedavg", "classify", {}),
        ("fedbfpt", "mlm", {"local_layers": 2}),
        ("fedbt", "classify", {"local_layers": 2, "variant": "half"}),  # the two upper layers, without the lowest
    ],
)
def test_the_gradient_of_the_lowest_layer_gives_tokens_at_their_places(
    audited: Audited, name: str, kind: str, method: dict[str, Any]
) -> None:
    stage = audited(name, kind, train=RAW, method=method)
    found = figures(stage, "layers", "1 step, 1 text", "span check")
    assert found["places recall"]["value"] == 1.0
    assert found["control group"]["value"] < 0.05
    assert of(stage, "layers", "1 step")["figures"]["auc"]["value"] > 0.95
    if kind == "classify":
        assert found["exact texts"]["value"] == 1.0


@pytest.mark.parametrize("kind", ["bert", "electra", "gpt2"])
def test_dropout_does_not_hide_a_text_from_who_knows_its_seed(
    audited: Audited, model_folder: Callable[..., Path], kind: str
) -> None:
    """Its masks put the inputs out of the span, so that no text was exact; the server can draw them again."""
    model = {"name": str(model_folder(kind, head="clm" if kind == "gpt2" else "mlm"))}
    stage = audited("fedavg", "classify", train={**RAW, "dropout": True}, model=model)
    found = figures(stage, "layers", "1 step, 1 text", "span check")
    assert found["places recall"]["value"] == found["exact texts"]["value"] == 1.0


@pytest.mark.parametrize(
    ("level", "cached", "texts", "steps", "known"),
    [
        ("none", False, 1, 1, True),
        ("client", False, 1, 1, True),
        ("example", False, 1, 1, False),  # between sites they are a secret of the site's
        ("none", True, 1, 1, False),
        ("none", False, 2, 1, False),
        ("none", False, 1, 2, False),
    ],
)
def test_masks_of_dropout_are_drawn_again_where_the_server_knows_them(
    level: str, cached: bool, texts: int, steps: int, known: bool
) -> None:
    train, trainer = SimpleNamespace(cache_frozen_layers=cached), SimpleNamespace(streams=Streams(0))
    job = SimpleNamespace(train=train, privacy=SimpleNamespace(level=level))
    bench: Any = SimpleNamespace(job=job, runtime=SimpleNamespace(trainer=trainer), round=0)
    batch = SimpleNamespace(inputs={"input_ids": torch.zeros(texts, 7)})
    reply = SimpleNamespace(steps=steps, client="a")
    played: Any = SimpleNamespace(texts=texts, reply=reply, seen=[SimpleNamespace(batch=batch)])
    assert (first_layer.masks_of(bench, played) is not None) is known


def test_adapters_are_read_through_their_factors(audited: Audited) -> None:
    stage = audited("fedavg", "classify", adapter={"kind": "lora", "rank": 8, "merge": "plain"}, train=RAW)
    assert of(stage, "adapters", "1 step, 1 text")["figures"]["auc"]["count"] == []
    assert not [finding for finding in stage["findings"] if finding["channel"] == "embeddings"]


def test_what_adapters_send_in_the_second_round_is_attacked(audited: Audited) -> None:
    """Their A, which by default is not sent before: that of a table tells every word, that of a layer some."""
    table = {"kind": "lora", "rank": 2, "targets": ["word_embeddings", "position_embeddings"]}
    stage = audited("fedavg", "classify", adapter=table, train={"epochs": 2, "steps": 3})
    for setting in ("1 step, 1 text of round 2", "1 step of round 2", "3 steps of round 2"):
        for attack in ("columns moved", "columns of positions"):
            found = figures(stage, "adapters", setting, attack)
            assert found["precision"]["value"] == found["recall"]["value"] == 1.0
    layer: dict[str, Any] = {
        "adapter": {"kind": "lora", "rank": 8},
        "task": {"labels": ["eye", "heart", "kidney"]},
    }

    def holds_chance(privacy: dict[str, Any], seed: int = 0) -> bool:
        train = {**RAW, "learning_rate": 1.0, "seed": seed}
        stage = audited("fedavg", "classify", train=train, privacy=privacy, **layer)
        found = figures(stage, "adapters", "1 step of round 2", "span check, not exact")
        return bool(found["auc"]["holds_chance"])

    assert not holds_chance({})
    noisy = [holds_chance({"level": "example", "epsilon": 1.0}, seed) for seed in range(6)]
    assert sum(noisy) >= 5  # an interval of 95 % misses chance once in 20 draws


def test_hidden_states_of_tokens_give_the_texts(audited: Audited, model_folder: Callable[..., Path]) -> None:
    stage = audited(
        "fedfreezebert",
        "classify",
        method={"variant": "centralized", "head": "hsum"},
        client={"may_send": ["hidden_states"]},
        model={"name": str(model_folder(layers=4))},
    )
    found = figures(stage, "hidden_states", "all texts", "ridge probe")
    assert found["tokens"]["value"] > 0.9
    assert found["ROUGE-L"]["value"] > 0.9
    assert found["tokens"]["low"] > found["tokens"]["chance"]


def test_texts_go_through_a_frozen_encoder_once_for_all_plays(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    compute = FeatureCache._compute

    def count(cache: FeatureCache, chosen: Any) -> Any:
        encoded.extend(chosen.tolist())
        return compute(cache, chosen)

    monkeypatch.setattr(FeatureCache, "_compute", count)
    stage = audited("fedfreezebert", "classify", method={"head": "mean"})
    assert len(stage["plays"]) == 3
    assert max(Counter(encoded).values()) == 2  # the client's text of this number, and the public one


def test_one_vector_for_a_text_gives_less(audited: Audited) -> None:
    method = {"variant": "centralized", "head": "mean"}
    stage = audited("fedfreezebert", "classify", method=method, client={"may_send": ["hidden_states"]})
    found = figures(stage, "hidden_states", "all texts", "ridge probe")
    assert found["auc"]["low"] > 0.5
    assert found["precision"]["value"] < 1.0


def test_which_words_are_common_is_not_read_from_a_vector(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors that tell nothing leave a reader what it has learned from public text, and chance knows as much."""
    decode = hidden_states.decode_hidden_states

    def noise(*given: Any) -> dict[str, Any]:
        message = decode(*given)
        return {**message, "features": torch.randn(message["features"].shape, generator=draw)}

    draw = torch.Generator().manual_seed(0)
    monkeypatch.setattr(hidden_states, "decode_hidden_states", noise)
    method = {"variant": "centralized", "head": "mean"}
    stage = audited("fedfreezebert", "classify", method=method, client={"may_send": ["hidden_states"]})
    area = figures(stage, "hidden_states", "all texts", "ridge probe")["auc"]
    assert area["low"] > 0.5
    assert area["low"] <= area["chance"]


@pytest.mark.parametrize("wire", [{}, {"activations_changed": 0.1, "dtype": "fp16"}])
def test_what_passes_the_cut_gives_tokens_masked_places_and_masked_words(
    audited: Audited, wire: dict[str, Any]
) -> None:
    stage = audited("fedbert", "mlm", train={"dropout": False, "epochs": 2}, wire=wire)
    assert figures(stage, "activations", "1 step", "nearest embedding")["tokens"]["value"] == 1.0
    assert figures(stage, "gradients", "1 step", "size")["recall"]["value"] == 1.0
    assert figures(stage, "gradients", "1 step", "size")["precision"]["value"] == 1.0
    assert figures(stage, "gradients", "1 step", "head's answer")["tokens"]["value"] >= 0.75


def test_of_a_causal_model_no_word_is_said_to_be_masked(
    audited: Audited, model_folder: Callable[..., Path]
) -> None:
    stage = audited("fedbert", "clm", model={"name": str(model_folder("gpt2", head="clm"))})
    said = [each["sentence"] for each in stage["findings"] if each["channel"] == "gradients"]
    assert [("predicted" in sentence, "masked" in sentence) for sentence in said] == [(True, False)] * 4


@pytest.mark.parametrize("wire", [{}, {"activations_changed": 0.1, "dtype": "fp16"}, {"gradients": "int4"}])
@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_what_passes_the_cut_gives_every_label(
    audited: Audited, tmp_path: Path, kind: str, wire: dict[str, Any]
) -> None:
    data = {"data": {"train": tagged(tmp_path), "test": tagged(tmp_path)}} if kind == "tag" else {}
    found = labels_read(audited("fedbert", kind, wire=wire, train={"epochs": 2}, **data))
    assert found["value"] == 1.0
    assert not found["holds_chance"]


@pytest.mark.parametrize("wire", [{}, {"activations_changed": 0.1}])
def test_labels_are_read_where_the_head_reads_the_last_token(
    audited: Audited, model_folder: Callable[..., Path], wire: dict[str, Any]
) -> None:
    model = {"name": str(model_folder("gpt2", head="clm"))}
    assert labels_read(audited("fedbert", "classify", model=model, wire=wire, train={"epochs": 2}))["value"] == 1.0


def test_gradients_of_other_texts_do_not_give_the_labels(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = activations._messages

    def of_others(view: Any, played: Any, what: str) -> Iterator[torch.Tensor]:
        for rows in messages(view, played, what):
            there = rows.any(1) if what == activations.GRADIENTS else torch.zeros(len(rows), dtype=torch.bool)
            yield rows.index_put((there,), rows[there].roll(1, 0))

    monkeypatch.setattr(activations, "_messages", of_others)
    assert labels_read(audited("fedbert", "classify", train={"epochs": 2}))["low"] < 0.5


def labels_read(stage: Stage) -> dict[str, Any]:
    """Of the longest round that was played."""
    return [f["figures"]["labels"] for f in stage["findings"] if f["attack"] == "head's answer"][-1]


def tagged(folder: Path) -> str:
    """A file with a tag for each word."""
    path = folder / "tags.jsonl"
    texts = [text.replace(".", "").split() for text, _ in SENTENCES]
    rows = [{"text": text, "label": ["B-X" if len(word) % 2 else "O" for word in text]} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


class Noise(StateCodec):
    """A defence by hand: whole states with much noise on every element."""

    def encode(self, tensors: Any, reference: Any, residual: Any) -> Any:
        """See :class:`fedstrata.wire.codec.Codec`."""
        draw = torch.Generator().manual_seed(int(sum(float(t.sum()) for t in tensors.values()) * 1e6) % 2**31)
        return {name: t + torch.randn(t.shape, generator=draw) for name, t in tensors.items()}, {}


def test_noise_brings_the_attacks_to_chance(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.client.setup.job_codec", lambda *_: Noise("fp32"))
    stage = audited("fedavg", "mlm", train={"steps": 2})
    for channel, attack in (("embeddings", "direction of rows"), ("token_head", "decoder bias, tuned")):
        assert figures(stage, channel, "2 steps", attack)["auc"]["holds_chance"], channel


def test_without_the_replay_the_proximal_term_hides_the_rows(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay is what makes the attack: one that forgets the steps finds nothing."""
    monkeypatch.setattr("fedstrata.audits.replay.step", lambda optimizer, rate: step(optimizer, 0.0))
    train = {"proximal_mu": 5.0, "epochs": 2, "steps": 3, "weight_decay": 0.5}
    stage = audited("fedprox", "classify", train=train)
    assert figures(stage, "embeddings", "3 steps", "rows moved")["auc"]["value"] < 1.0


def test_the_record_is_written_and_an_audit_repeats(audited: Audited, tmp_path: Path) -> None:
    first = audited("fedavg", "classify")
    record = json.loads((tmp_path / "run" / "audit.json").read_text("utf-8"))
    assert record["format"] == 1
    assert record["stages"] == [first]
    assert {**audited("fedavg", "classify"), "model": ""} == {**first, "model": ""}  # in another folder


def test_an_audit_before_a_run_is_not_in_its_way(
    job: Callable[..., dict[str, Any]], public: str, tmp_path: Path
) -> None:
    made = job("fedavg", "classify")
    fedstrata.audit(made, public=public)
    fedstrata.run(made, {"method.rounds": 1})
    page = fedstrata.report(tmp_path / "run").read_text("utf-8")
    assert "from the embeddings the server reads" in page


def test_where_nothing_is_sent_nothing_is_attacked(audited: Audited, tmp_path: Path) -> None:
    stage = audited("local", "classify")
    assert stage["findings"] == []
    assert any("nothing leaves" in note for note in stage["notes"])
    pooled = audited("centralized", "classify")
    assert pooled["findings"] == []
    assert POOLED in pooled["notes"]


UNKNOWN = "no token that the tokenizer knows"


@pytest.mark.parametrize("name", ["fedavg", "fedbert", "fedfreezebert"])
def test_a_play_knows_which_texts_it_used(audited: Audited, name: str) -> None:
    hidden = {"method": {"variant": "centralized"}, "head": {"kind": "mean"}} if name == "fedfreezebert" else {}
    stage = audited(name, "classify", **hidden, client={"may_send": ["weights", "hidden_states", "activations"]})
    assert stage["findings"]
    assert all(play["texts"] and play["distinct_tokens"] for play in stage["plays"])
    assert not any(UNKNOWN in note for note in stage["notes"])


def test_of_texts_without_a_known_word_none_is_read(audited: Audited, tmp_path: Path) -> None:
    rows = tmp_path / "unknown.csv"
    rows.write_text("text,label\n" + "".join(f"qzx{'zw' * (i % 5)},{'ab'[i % 2]}\n" for i in range(12)), "utf-8")
    data = {"train": str(rows), "test": str(rows)}
    stage = audited("fedavg", "classify", data=data, train=RAW)
    assert not [finding for finding in stage["findings"] if "exactly" in finding["sentence"]]
    assert any(UNKNOWN in note for note in stage["notes"])


@pytest.mark.parametrize("name", ["roberta", "modernbert", "distilbert", "electra"])
def test_every_family_is_audited(audited: Audited, model_folder: Callable[..., Path], name: str) -> None:
    stage = audited("fedavg", "classify", model={"name": str(model_folder(name))}, train={"steps": 1})
    assert figures(stage, "embeddings", "1 step", "rows moved")["recall"]["value"] == 1.0


@pytest.mark.parametrize("merge", ["plain", "freeze_a"])
def test_an_adapter_of_the_embeddings_names_every_token(audited: Audited, merge: str) -> None:
    """By the columns of its A; its B alone is said to be unread."""
    lora = {"kind": "lora", "rank": 2, "targets": ["word_embeddings", "position_embeddings"], "merge": merge}
    stage = audited("fedavg", "classify", adapter=lora, train={"epochs": 2, "steps": 3, "weight_decay": 0.5})
    attacks = {finding["attack"] for finding in stage["findings"] if finding["channel"] == "adapters"}
    unread = any("adapter.b: no attack here reads them" in note for note in stage["notes"])
    assert (attacks, unread) == (
        ({"columns moved", "columns of positions"}, False) if merge == "plain" else (set(), True)
    )
    for attack in attacks:
        for setting in ("1 step, 1 text", "1 step", "3 steps"):
            found = figures(stage, "adapters", setting, attack)
            assert found["precision"]["value"] == found["recall"]["value"] == 1.0


def test_rows_of_positions_of_gpt2_tell_the_length(audited: Audited, model_folder: Callable[..., Path]) -> None:
    stage = audited(
        "fedavg", "classify", model={"name": str(model_folder("gpt2", head="clm"))}, train={"steps": 1}
    )
    assert figures(stage, "embeddings", "1 step", "position rows")["recall"]["value"] == 1.0


def test_the_second_text_of_a_pair_is_read_as_one(audited: Audited, tmp_path: Path) -> None:
    """Its tokens have a type of their own, which is part of what enters the lowest layer."""
    rows = tmp_path / "pairs.csv"
    texts = [text for text, _ in SENTENCES]
    rows.write_text("text,other,label\n" + "".join(f'"{a}","{b}",{len(a) % 2}\n' for a, b in pairwise(texts)))
    data = {"train": str(rows), "test": str(rows), "text": ["text", "other"]}
    stage = audited("fedbert", "pair", data=data, train={"steps": 1})
    assert figures(stage, "activations", "1 step", "nearest embedding")["tokens"]["value"] == 1.0
    raw = {**RAW, "batch_size": 4}
    stage = audited("fedavg", "pair", data=data, train=raw, model={"name": str(wide(tmp_path))})
    found = figures(stage, "layers", "1 step, 1 text", "span check")
    assert found["places recall"]["value"] == found["places precision"]["value"] == 1.0


def wide(folder: Path) -> Path:
    """A model whose width is more than a pair has tokens, and whose layers move far enough."""
    made = folder / "wide"
    tiny_model("bert", "mlm", 2, hidden_size=64, initializer_range=0.3).save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


def test_rounding_of_large_weights_is_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row moves by the learning rate, as under noise: the two digits that count are the same."""
    before = torch.tensor([[0.01], [0.6], [0.001], [0.3], [3e-5]])
    after = before + torch.tensor([[1e-4], [1e-4], [1e-4], [0.0], [2e-9]])
    monkeypatch.setattr(embeddings, "moved_beyond", lambda *_: {"table": after - before})
    assert len({float(change) for change in (after - before)[:3]}) == 3
    view: Any = SimpleNamespace(bench=SimpleNamespace(parts=SimpleNamespace(word_factors=lambda names: [])))
    played: Any = None
    moved = embeddings._moved(view, played, ["table"])
    assert moved.round(12).tolist() == [1e-4, 1e-4, 1e-4, 0.0, 2e-9]
