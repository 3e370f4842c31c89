"""All that is drawn in a round with noise is the site's secret, and the same noise never covers two messages."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from fedstrata.client.answer import ClientData
from fedstrata.client.noisy_steps import NoisySteps
from fedstrata.client.poisson import poisson_steps
from fedstrata.client.private import Private, private_of
from fedstrata.data.tokens import Tokens
from fedstrata.job.file import load
from fedstrata.job.privacy_table import Privacy
from fedstrata.job.tables import Train
from fedstrata.methods.fedavg import FedAvg
from fedstrata.methods.fedsplitbert import FedSplitBERT
from fedstrata.plan.messages import Request
from fedstrata.plan.plan import Method, Plan, make_plan
from fedstrata.plan.schedule import round_span
from fedstrata.plan.streams import Streams
from fedstrata.sites.noise import ASKED, KEY
from fedstrata.sites.rows_behind import SELDOM, rows_sampled
from fedstrata.sites.site import Site
from fedstrata.sites.site_job import _own_count
from fedstrata.tasks import Examples
from fedstrata.tasks.mlm import masked_lm
from fedstrata.wire.codec import WireError
from fedstrata.wire.store import Store
from roles import make_runtime
from tiny import tiny_model, tokenizer

NOISE, CLIP, ROWS = 1e-3, 0.1, 16
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def site_in(folder: Path, method: Method, rows: Sequence[int] = range(ROWS), seed: int = 0, **config: Any) -> Site:
    """A site of which messages have next to no noise, with some of the same rows, all of which take part."""
    task = masked_lm(tokenizer(), len(tokenizer()), 0.15, False)
    plain = {"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0}
    runtime = make_runtime(tiny_model("bert", "mlm", **config), task, batch_size=ROWS, **plain)
    private = Private(Privacy(level="example", noise=NOISE, clip=CLIP), runtime.trainer.train, private_of)  # type: ignore[arg-type]
    trainer = replace(runtime.trainer, streams=Streams(seed))
    ids = np.random.default_rng(0).integers(5, 40, (ROWS, 10)).astype(np.int32)[list(rows)]
    tokens = Tokens(ids.ravel(), np.arange(0, ids.size + 1, 10), np.arange(len(ids)))
    examples = Examples(tokens)
    data = ClientData(examples, np.arange(len(ids)), examples, {"a": np.arange(0)}, Store(folder))
    return Site("a", method, "mlm", replace(runtime, trainer=trainer, private=private), data, folder)


def asked(site: Site, round: int = 0) -> Request:
    parts = site.runtime.working.parts
    plan = make_plan(site.method, parts, site.task, round, "a", site.runtime.trainer.streams)
    span = round_span(round, site.method.rounds)
    return Request(round, "a", plan, "train", dict.fromkeys(plan.received(parts), 0), {}, span=span)


def message(site: Site, round: int = 0) -> torch.Tensor:
    weights = site.answer(asked(site, round)).weights
    return torch.cat([tensor.double().flatten() for part in weights.values() for tensor in part.values()])


def with_key_of(site: Site, folder: Path) -> Path:
    """A folder of a site that has the same secret and has not answered yet."""
    folder.mkdir()
    shutil.copy(site.folder / KEY, folder / KEY)
    return folder


@pytest.mark.parametrize("config", [{}, QUIET], ids=["masks and dropout", "masks"])
def test_nothing_that_is_drawn_follows_from_the_seed_of_the_job(tmp_path: Path, config: dict[str, float]) -> None:
    """Masks and dropout hang on the examples before: with these known, one example moves the sum by many clips."""
    one = site_in(tmp_path / "one", FedAvg(), **config)
    first = message(one)
    assert torch.equal(message(site_in(with_key_of(one, tmp_path / "again"), FedAvg(), **config)), first)
    assert torch.equal(message(site_in(with_key_of(one, tmp_path / "seed"), FedAvg(), seed=9, **config)), first)
    moved = (message(site_in(tmp_path / "other", FedAvg(), **config)) - first) * ROWS / CLIP
    assert moved.norm() > 10 * NOISE * (2 * len(first)) ** 0.5, "in clips; noise alone comes to a tenth of it"


def test_at_a_site_texts_go_through_the_model_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's weights can enlarge rounding, which hangs on the other texts of a batch."""
    seen, add = list[int](), NoisySteps._add_clipped

    def noted(self: NoisySteps, total: Any, batch: Any, *rest: Any) -> torch.Tensor:
        seen.append(len(batch.inputs["input_ids"]))
        return add(self, total, batch, *rest)

    monkeypatch.setattr(NoisySteps, "_add_clipped", noted)
    message(site_in(tmp_path / "one", FedAvg()))
    assert seen == [1] * ROWS


def test_other_rows_do_not_get_the_noise_of_those_before(tmp_path: Path) -> None:
    one = site_in(tmp_path / "one", FedAvg())
    message(one)
    for rows in (range(1, ROWS), range(ROWS)[::-1]):
        with pytest.raises(WireError, match="another request was answered with noise"):
            message(site_in(tmp_path / "one", FedAvg(), rows))
    message(site_in(tmp_path / "one", FedAvg()))


def test_what_it_has_kept_since_does_not_get_the_noise_of_before(tmp_path: Path) -> None:
    """Asked for the second round, then for the first, then for the second: it would start from other own parts."""
    site = site_in(tmp_path / "one", FedSplitBERT(critical_layer=1, rounds=3))
    assert asked(site, 1).plan.keep
    message(site, 1)
    message(site, 1)
    message(site, 0)
    with pytest.raises(WireError, match="round 2: another request was answered with noise"):
        message(site, 1)
    assert len((site.folder / ASKED).read_text().splitlines()) == 2


@pytest.mark.parametrize("batch", [2, 20, 60, 200])
@pytest.mark.parametrize("steps", [1, 8])
def test_fewer_rows_than_are_counted_take_part_once_in_a_million_rounds(batch: int, steps: int) -> None:
    train, rows = Train(batch_size=batch, steps=steps), 200
    counted = rows_sampled(train, rows, rows, Request(0, "a", Plan((), ()), "train", {}, {}))
    takes_part = 1 - (1 - batch / rows) ** min(steps, -(-rows // batch))
    assert binom.cdf(counted - 1, rows, takes_part) <= SELDOM or counted == 1
    assert counted == rows or binom.cdf(counted, rows, takes_part) > SELDOM
    draws = np.random.default_rng(0)
    for _ in range(200):
        chosen = [b for step in poisson_steps(np.full(rows, 5), train, draws) for b in step.batches]
        assert counted <= max(1, len(set(np.concatenate(chosen).tolist()) if chosen else ()))


def test_steps_that_barely_learn_do_not_count() -> None:
    request = Request(0, "a", Plan((), ()), "train", {}, {}, span=(0.0, 1.0))
    falls = Train(batch_size=10, steps=8, lr_schedule="polynomial", lr_power=8.0)
    whole = rows_sampled(falls.model_copy(update={"lr_schedule": "constant"}), 80, 80, request)
    assert 1 < rows_sampled(falls, 80, 80, request) < whole, "half of the steps are below a hundredth"


def test_the_noise_of_stages_is_not_the_same() -> None:
    """Or the difference of what two stages send would have none."""
    stages = [{"name": "one"}, {"name": "two", "start": "one"}]
    made = {
        "model": {"name": "demo:minilm"},
        "data": {"train": "rows.csv", "test": "rows.csv"},
        "task": {"kind": "classify"},
        "clients": {"count": 2},
        "method": {"name": "fedavg"},
        "privacy": {"level": "client", "noise": 1.0, "single_message": True},
        "stages": stages,
    }
    request, drawn = Request(0, "a", Plan((), ()), "train", {}, {}), []
    for job in load(made):
        private = private_of(job)
        assert private is not None
        drawn.append([private.draw(request, {})(use) for use in ("noise", "noise", "sample", "masks")])
    (one, again, *_), (two, *_) = drawn
    assert one == again
    assert len({key for each in drawn for key in each}) == 6
    assert one != two


def test_a_server_that_names_no_rounds_gets_noise_for_all_of_them() -> None:
    made = {
        "model": {"name": "demo:minilm"},
        "data": {"train": "rows.csv", "test": "rows.csv"},
        "task": {"kind": "classify"},
        "clients": {"count": 1},
        "method": {"name": "fedavg"},
        "privacy": {"level": "example", "epsilon": 8.0, "participations": 1},
    }
    [job] = load(made)
    assert _own_count(job).privacy.participations == job.method.rounds == 5
    [job] = load({**made, "privacy": {"level": "example", "noise": 1.0}})
    assert _own_count(job).privacy == job.privacy
