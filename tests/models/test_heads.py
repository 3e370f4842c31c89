"""Heads of our own: the papers' wiring by hand, their bytes, folders that come back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fedstrata
from fedstrata.cost.bytes import payload
from fedstrata.errors import UserError
from fedstrata.job.file import load as load_job
from fedstrata.models import checkpoints
from fedstrata.models.heads import KEY, HeadConfig, HeadedModel, hsum, psum
from fedstrata.models.parts import find_parts, part_tensors
from fedstrata.plan.parts import Parts
from tiny import SENTENCES, saved_tensors, tiny_config

Jobs = Callable[..., dict[str, Any]]
Folder = Callable[..., Path]
LABELS = ("NEG", "NEU", "POS")
KINDS = ("cls", "mean", "psum", "hsum")


def headed(head: HeadConfig, architecture: str = "bert", layers: int = 4) -> Any:
    config = tiny_config(architecture, layers, num_labels=3)
    setattr(config, KEY, vars(head))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return HeadedModel.from_config(config).eval()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts of 9, 5 and 2 tokens, padded."""
    ids = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 5, 2])[:, None]).long()
    return ids * mask, mask


@pytest.fixture(scope="module")
def bert() -> Callable[[HeadConfig], Parts]:
    def make(head: HeadConfig) -> Parts:
        config = transformers.BertConfig(num_labels=3)
        setattr(config, KEY, vars(head))
        with torch.device("meta"):
            return find_parts(HeadedModel.from_config(config))

    return make


@pytest.mark.parametrize(
    ("head", "parts", "size"),
    [
        (HeadConfig("cls"), ("head",), 9_228),
        (HeadConfig("mean"), ("head",), 9_228),
        (HeadConfig("psum"), ("head",), 113_442_864),
        (HeadConfig("hsum"), ("head",), 113_442_864),
        (HeadConfig("hsum", classifier="shared"), ("head",), 113_415_180),
        (HeadConfig("psum", classifier="shared", pooler=True), ("pooler", "head"), 115_777_548),
    ],
)
def test_the_sizes_of_the_paper(
    bert: Callable[[HeadConfig], Parts], head: HeadConfig, parts: tuple[str, ...], size: int
) -> None:
    """FACTS of FedFreezeBERT: four T-layers of 28,351,488 bytes and classifiers of 9,228."""
    made = bert(head)
    assert payload(made, parts) == size
    assert ("pooler" in made.names) == head.pooler


def test_the_branches_of_layers_that_do_nothing() -> None:
    """P-SUM gives H12, H11, H10, H9; H-SUM their running sums from the top."""
    hidden = [torch.full((1, 1, 1), float(value)) for value in (12, 11, 10, 9)]
    same = nn.Module()
    same.forward = lambda state, mask: state  # type: ignore[method-assign]
    layers: Sequence[nn.Module] = [same] * 4
    assert [int(y) for y in psum(layers, hidden, torch.ones(1))] == [12, 11, 10, 9]
    assert [int(y) for y in hsum(layers, hidden, torch.ones(1))] == [12, 23, 33, 42]


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "electra"])
@pytest.mark.parametrize("kind", KINDS)
def test_against_plain_torch(architecture: str, kind: str) -> None:
    """Text by text without padding, from the encoder's own hidden states."""
    model = headed(HeadConfig(kind), architecture)
    ids, mask = texts()
    base = getattr(model, model.base_model_prefix)
    with torch.no_grad():
        made = model(input_ids=ids, attention_mask=mask)
        for row, length in enumerate(mask.sum(1)):
            hidden = base(input_ids=ids[row : row + 1, :length], output_hidden_states=True).hidden_states[1:]
            if kind == "cls":
                vectors = [hidden[-1][:, 0]]
            elif kind == "mean":
                vectors = [hidden[-1].mean(1)]
            else:
                state, vectors = torch.zeros(()), []
                for i, layer in enumerate(model.head.layers):
                    state = layer(hidden[-1 - i] + (state if kind == "hsum" else 0))
                    vectors.append(state[:, 0])
            logits = torch.cat([c(v) for c, v in zip(model.head.classifiers, vectors, strict=True)])
            assert torch.allclose(made.branches[row], logits, atol=1e-5)
            assert torch.allclose(made.logits[row], logits.mean(0), atol=1e-5)


def test_the_options_say_what_they_do() -> None:
    ids, mask = texts()
    with torch.no_grad():
        shared = headed(HeadConfig("psum", classifier="shared"))
        assert len(shared.head.classifiers) == 1
        odds = headed(HeadConfig("hsum", average="probabilities"))(input_ids=ids, attention_mask=mask)
        assert torch.allclose(odds.logits.exp(), odds.branches.softmax(-1).mean(1), atol=1e-6)
        pooled = headed(HeadConfig("cls", pooler=True))
        hidden = pooled.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        vector = torch.tanh(pooled.bert.pooler.dense(hidden[:, 0]))
        made = pooled(input_ids=ids, attention_mask=mask)
        assert torch.allclose(made.logits, pooled.head.classifiers[0](vector), atol=1e-6)
        for tokens, weight in (
            ("text", mask),
            ("all", torch.ones_like(mask)),
            ("inner", torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1] + [0] * 7])),
        ):
            model = headed(HeadConfig("mean", tokens=tokens))
            state = model.bert(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (state * weight[:, :, None]).sum(1) / weight.sum(1, keepdim=True)
            logits = model(input_ids=ids, attention_mask=mask).logits
            assert torch.allclose(logits, model.head.classifiers[0](mean), atol=1e-5), tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_comes_back(model_folder: Folder, tmp_path: Path, kind: str) -> None:
    loaded = checkpoints.load(str(model_folder(layers=4)), "classify", LABELS, 3, head=HeadConfig(kind))
    assert loaded.fresh == ("head",)
    assert checkpoints.load(str(model_folder(layers=4)), "classify", LABELS, 3, head=HeadConfig(kind)).fresh == (
        "head",
    )
    weights = part_tensors(loaded.model, loaded.parts, loaded.parts.names)
    checkpoints.save(loaded, weights, tmp_path / "model")
    ids, mask = texts()
    with torch.no_grad():
        expected = loaded.model.eval()(input_ids=ids, attention_mask=mask).logits
        plain = HeadedModel.from_pretrained(tmp_path / "model").eval()
        assert plain(input_ids=ids, attention_mask=mask).logits.equal(expected)
        again = checkpoints.load(str(tmp_path / "model"), "classify", LABELS, 9)
        assert again.fresh == ()
        assert again.model.eval()(input_ids=ids, attention_mask=mask).logits.equal(expected)
    assert checkpoints.load(str(tmp_path / "model"), "mlm", None, 9).fresh == ("head",), (
        "its encoder serves other tasks"
    )


def test_a_new_head_depends_on_the_seed_alone(model_folder: Folder) -> None:
    folder = str(model_folder(layers=4))
    one, same, other = (
        checkpoints.load(folder, "classify", LABELS, seed, head=HeadConfig("psum")).model.head.layers[2]
        for seed in (5, 5, 6)
    )
    weight = one.attention.self.query.weight
    assert weight.equal(same.attention.self.query.weight)
    assert not weight.equal(other.attention.self.query.weight)
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert one.attention.self.query.bias.eq(0).all()


@pytest.mark.parametrize(
    ("architecture", "head", "words"),
    [
        ("bert", HeadConfig("psum"), r"\[head\] kind: 'psum' takes the last four layers, bert has 3"),
        ("distilbert", HeadConfig("cls", pooler=True), r"\[head\] pooler: distilbert has none"),
        ("modernbert", HeadConfig("mean"), r"\[head\] kind: 'mean' does not go with modernbert.*final_norm"),
    ],
)
def test_what_a_model_cannot_have(architecture: str, head: HeadConfig, words: str) -> None:
    with pytest.raises(UserError, match=words):
        headed(head, architecture, layers=3)


def test_a_projection_after_opts_layers_goes_with_no_head() -> None:
    """Its states have another width, at which the first batch ended in a traceback."""
    sizes = {"vocab_size": 50, "num_attention_heads": 2, "num_hidden_layers": 4, "ffn_dim": 32}
    for width in (16, 8):
        config = transformers.OPTConfig(hidden_size=16, word_embed_proj_dim=width, **sizes)
        setattr(config, KEY, vars(HeadConfig("psum")))
        if width == 16:
            HeadedModel.from_config(config)
            continue
        with pytest.raises(UserError, match=r"'psum' does not go with opt, whose layers .* decoder\.project_out"):
            HeadedModel.from_config(config)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"head": {"classifier": "shared"}}, r"\[head\] kind: is missing"),
        ({"head": {"kind": "psun"}}, "did you mean 'psum'"),
        (
            {"head": {"kind": "psum"}, "task": {"kind": "mlm"}},
            "goes with classify, pair and regress, not with 'mlm'",
        ),
        ({"head": {"kind": "mean", "tokens": "all"}}, "needs train.padding = 'max'"),
        ({"head": {"kind": "mean", "pooler": True}}, "does not go with 'mean'"),
        (
            {"head": {"kind": "psum", "average": "probabilities"}, "task": {"kind": "regress"}},
            "has no probabilities",
        ),
    ],
)
def test_what_a_job_cannot_say(job: Jobs, tables: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_job({**job("fedavg", "classify"), **tables})


@pytest.mark.parametrize("method", ["fedavg", "centralized", "fedsplitbert", "fedbt"])
def test_every_method_takes_a_head(job: Jobs, method: str) -> None:
    options = {"critical_layer": 2} if method == "fedsplitbert" else {}
    made = job(method, "classify", 4, head={"kind": "hsum"}, method=options)
    result = fedstrata.run(made)
    model = HeadedModel.from_pretrained(result.model_folder or result.folder / "clients" / "client-1" / "model")
    assert model.settings == HeadConfig("hsum")
    sent = {line["part"] for line in result.transfers if line["phase"] == "train"}
    assert ("head" in sent) == (method in ("fedavg", "fedbt")), "the head of personal models stays at home"


def test_a_later_stage_goes_on_with_the_head(job: Jobs, tmp_path: Path) -> None:
    made = job("fedavg", "classify", 4, train={"steps": 1})
    made["stages"] = [{"name": "one", "head": {"kind": "psum"}}, {"name": "two"}]
    result = fedstrata.run(made)
    assert HeadedModel.from_pretrained(result.model_folder).settings == HeadConfig("psum")


def test_a_saved_head_is_saved_again_with_its_head(model_folder: Folder, tmp_path: Path) -> None:
    """By an Auto class, once this package's heads are imported; the encoder alone comes without the head."""
    loaded = checkpoints.load(str(model_folder(layers=4)), "classify", LABELS, 3, head=HeadConfig("psum"))
    checkpoints.save(loaded, part_tensors(loaded.model, loaded.parts, loaded.parts.names), tmp_path / "one")
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    ids, mask = texts()
    with torch.no_grad():
        expected = loaded.model.eval()(input_ids=ids, attention_mask=mask).logits
        again = auto.from_pretrained(tmp_path / "two").eval()
        assert again(input_ids=ids, attention_mask=mask).logits.equal(expected)
    assert again.config.id2label == dict(enumerate(LABELS))
    encoder = transformers.AutoModel.from_pretrained(tmp_path / "two")
    assert type(encoder) is transformers.BertModel
    assert encoder.pooler is None
    with pytest.raises(ValueError, match="HeadedConfig"):
        transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "two")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_takes_batches_of_a_model_with_a_head(model_folder: Folder, tmp_path: Path, kind: str) -> None:
    """It takes apart all that a model gives by the first dimension, and found branches there: an IndexError."""
    loaded = checkpoints.load(str(model_folder(layers=4)), "classify", LABELS, 3, head=HeadConfig(kind))
    checkpoints.save(loaded, part_tensors(loaded.model, loaded.parts, loaded.parts.names), tmp_path / "model")
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "model"))
    rows = [text for text, _ in SENTENCES[:6]]
    alone, together = (pipeline(rows, batch_size=size) for size in (1, 6))
    for one, other in zip(alone, together, strict=True):
        assert one["label"] == other["label"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)


def test_a_head_under_the_encoders_own_model_type_is_read_too(model_folder: Folder, tmp_path: Path) -> None:
    """As folders were written before; only transformers alone would make up a head for them."""
    loaded = checkpoints.load(str(model_folder(layers=4)), "classify", LABELS, 3, head=HeadConfig("mean"))
    checkpoints.save(loaded, part_tensors(loaded.model, loaded.parts, loaded.parts.names), tmp_path / "model")
    loaded.model.config.save_pretrained(tmp_path / "model")
    again = checkpoints.load(str(tmp_path / "model"), "classify", LABELS, 9)
    assert again.fresh == ()
    assert again.model.head.classifiers[0].weight.equal(loaded.model.head.classifiers[0].weight)
    assert HeadedModel.from_pretrained(tmp_path / "model").settings == HeadConfig("mean")


def test_a_model_without_one_of_our_heads_is_no_headed_model(model_folder: Folder) -> None:
    with pytest.raises(UserError, match=r"its config.json names no head of \[head\]"):
        HeadedModel.from_pretrained(model_folder())


@pytest.mark.parametrize("command", [fedstrata.run, fedstrata.forecast])
@pytest.mark.parametrize(
    ("method", "layers"), [("fedbfpt", {}), ("fedbt", {"local_layers": 3, "cycle": 1})], ids=["fedbfpt", "fedbt"]
)
def test_a_head_over_four_layers_needs_four_at_the_client(
    job: Callable[..., dict[str, Any]], command: Callable[[Any], Any], method: str, layers: dict[str, int]
) -> None:
    with pytest.raises(UserError, match=r"\[head\] kind: 'psum' takes the last 4 layers, .* a client builds [23]"):
        command(job(method, "classify", 4, method=layers, head={"kind": "psum"}))


@pytest.mark.parametrize("kind", ["psum", "hsum"])
def test_a_first_pass_with_some_of_the_layers_leaves_no_states_out_later(job: Jobs, kind: str) -> None:
    """A local model with a layer twice, before the whole one was ever computed with; its forecast likewise."""
    made = job("fedbfpt", "classify", 8, method={"local_layers": 5, "rounds": 4}, head={"kind": kind})
    fedstrata.forecast(made)
    ends = [
        saved_tensors(fedstrata.run(made, {"output.dir": folder, "server.evaluate": when}).model_folder)
        for when, folder in (("rounds", f"{made['output']['dir']}-a"), ("end", f"{made['output']['dir']}-b"))
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
