"""Short trainings of a client through its own code: the loss of texts after what it would send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstrata.audits.bench import Bench
from fedstrata.audits.figures import Floats
from fedstrata.audits.play import Played, play
from fedstrata.audits.some_texts import losses
from fedstrata.client.steps import steps
from fedstrata.errors import plural
from fedstrata.events import Noted
from fedstrata.job.tables import Train
from fedstrata.plan.kinds import Index, Weights
from fedstrata.plan.streams import ORDER
from fedstrata.tasks import Batch, Examples

SHORT = "short training"
"""What the findings call it."""
WORK = 1e12
"""Most FLOPs of one training: six of them are to take minutes. Longer ones are cut, and this is said."""


@dataclass
class ShortTrainings:
    """The short trainings of a client.

    Attributes:
        bench: the stage.
        plays: what was trained, as it stands in ``audit.json``.
        cut: passes of the run, where fewer were trained; else 0.
        fewest: texts that a training drew from; 0 before the first.
    """

    bench: Bench
    plays: list[dict[str, Any]] = field(default_factory=list)
    cut: int = 0
    fewest: int = 0

    def train(self, name: str, examples: Examples, index: Index, steps: int | None = None) -> Played:
        """A training in which every text is passed as often as in the run, as far as the bound allows.

        Args:
            name: of the training: its random streams are drawn under it.
            examples: all texts.
            index: those that are trained on; one may stand in it several times.
            steps: of the first round, in place of that.
        """
        bench = self.bench
        bench.tell(Noted(f"{bench.job.stage or 'this job'}: {name}, {plural(len(index), 'text')}"))
        if steps is None:
            train, until = self._whole(examples, index), 1.0
        else:
            train, until = bench.job.train.model_copy(update={"epochs": 1, "steps": steps}), None
        self.fewest = min(self.fewest or len(index), len(index))
        played = play(bench, f"{bench.client}, {name}", examples, index, train, until)
        self.plays.append(
            {
                "setting": name,
                "steps": played.reply.steps,
                "texts": played.texts,
                "distinct_tokens": int(played.token_ids(bench.vocabulary, bench.special).sum()),
            }
        )
        return played

    def losses(self, played: Played, batches: Sequence[Batch]) -> Floats:
        """The loss of every batch after a training, ``[n]``.

        Args:
            played: the training.
            batches: as :func:`fedstrata.audits.some_texts.drawn_batches` makes them.
        """
        bench = self.bench
        working = bench.ready.runtime.working
        working.load({part: (None, tensors) for part, tensors in trained_weights(bench, played).items()})
        return losses(bench, working, batches)

    def _whole(self, examples: Examples, index: Index) -> Train:
        """How all rounds together train, as far as the bound allows."""
        wanted = passes(self.bench)
        most = max(1, int(WORK / max(1.0, pass_flops(self.bench, examples, index))))
        if wanted > most:
            self.cut = wanted
        return self.bench.job.train.model_copy(update={"epochs": min(wanted, most), "steps": None})

    @property
    def steps(self) -> int:
        """Steps of the last training."""
        return int(self.plays[-1]["steps"]) if self.plays else 0


def trained_weights(bench: Bench, played: Played) -> Weights:
    """The model after a training, as the server holds it: the start model with what the client sent."""
    return {part: {**tensors, **played.after.get(part, {})} for part, tensors in bench.start.items()}


def passes(bench: Bench) -> int:
    """How often the run passes over each of the client's texts, at least 1.

    Of noise on each message (``level = "client"``) a training has but one message's, and so it is one round's.
    """
    job = bench.job
    lengths = bench.ready.train.tokens.lengths[bench.index]
    order = bench.ready.runtime.trainer.streams.numpy(0, bench.client, ORDER)
    first = next(steps(lengths, job.train, order), None)
    rounds = 1 if job.privacy.level == "client" else job.method.rounds
    return max(1, round(rounds * first.total / max(1, first.epoch_steps))) if first else 1


def pass_flops(bench: Bench, examples: Examples, index: Index) -> float:
    """About the FLOPs of training on every text once: 6 for each weight and token (Kaplan et al. 2020)."""
    weights = sum(sum(part.linear) for part in bench.parts.each if part.kind != "head")
    return 6.0 * weights * float(examples.tokens.lengths[index].sum())


def that_fit(bench: Bench, examples: Examples, index: Index, share: float) -> Index:
    """The first of ``index`` that can be trained on once for a share of :data:`WORK`; at least one."""
    costs = np.cumsum([pass_flops(bench, examples, np.asarray([i])) for i in index])
    return index[: max(1, int(np.searchsorted(costs, share * WORK, side="right")))]
