"""What ``[privacy]`` means for a client: how much noise, from which stream, and what it does not tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedstrata.client.poisson import sampling
from fedstrata.errors import UserError
from fedstrata.job.privacy_table import Privacy
from fedstrata.job.tables import Job, Train
from fedstrata.plan.kinds import Tensors, Weights
from fedstrata.plan.messages import Positions, Reply, Request
from fedstrata.plan.streams import DROPOUT, Streams
from fedstrata.privacy.accounting import Spending, calibrate
from fedstrata.privacy.discrete import discrete_gaussian
from fedstrata.privacy.fixed_point import RANGE
from fedstrata.privacy.keystream import Keystream
from fedstrata.privacy.noise import DIVERGED, LOG, privatized

Draw = Callable[[str], bytes]
"""Use -> the key of its stream, 32 bytes, of one request."""
Vector = npt.NDArray[np.float64]
LEAST_SHARE, MOST_SHARE = 2.0**-20, 0.25
"""Deviations of one client's numbers in a sum: a sixteenth of the largest that a sum takes, and sixteen steps."""
FAR = 10.0
"""Deviations beyond which noise does not go: one number in 10^22 does."""
SAMPLE = "sample"
"""Use of the stream that decides which examples take part."""
NOISE = "noise"
"""Use of the stream of the noise."""
MASKS = "masks"
"""Use of the stream of what a task masks."""


@dataclass(frozen=True)
class ExampleNoise:
    """The noise of one client's round of training, and all else in it that is drawn.

    What is masked and dropped of an example hangs on how many come before it. So whoever knows these streams too
    can tell whether one is there from all the others, and no clip bounds that: they are as secret as the noise.

    Attributes:
        clip: the longest gradient of an example.
        noise: standard deviation of the noise, in units of ``clip``.
        expected: expected number of examples of a step, which the noised sum is divided by.
        sample: decides which examples take part.
        stream: draws the noise.
        masks: draws what a task masks.
        dropout: seed of the stream of dropout.
        alone: examples go through the model one by one, see :attr:`Private.alone`.
    """

    clip: float
    noise: float
    expected: float
    sample: np.random.Generator
    stream: Keystream
    masks: np.random.Generator
    dropout: int
    alone: bool = False


@dataclass
class Private:
    """The noise of a stage's clients.

    Attributes:
        table: the job's ``[privacy]``.
        train: the job's ``[train]``.
        draw: a request, and all tensors that its training starts from -> the keys of its noise. Of this
            process they follow from the job's seed; a site puts its own in their place, which no one else knows.
        at_site: whoever sends the weights is not trusted.
    """

    table: Privacy
    train: Train
    draw: Callable[[Request, Weights], Draw]
    at_site: bool = False

    @property
    def alone(self) -> bool:
        """Whether examples go through the model one by one.

        How a product is rounded hangs on the others of a batch and on the longest of them, and weights can be made
        that enlarge rounding: one example would then change the gradients of all others, which no clip bounds.
        """
        return self.at_site and self.table.level == "example"

    def example_noise(self, draw: Draw, examples: int) -> ExampleNoise | None:
        """The noise over a client's gradients; None where the level is another."""
        if self.table.level != "example":
            return None
        rate, _, _ = sampling(examples, self.train)
        noise = noise_of(self.table, self.train, examples)
        return ExampleNoise(
            clip=self.table.clip,
            noise=noise,
            expected=rate * examples,
            sample=_generator(draw(SAMPLE)),
            stream=Keystream(draw(NOISE)),
            masks=_generator(draw(MASKS)),
            dropout=int.from_bytes(draw(DROPOUT)[:8], "little") >> 1,
            alone=self.alone,
        )

    def message(self, sent: Weights, start: Mapping[str, Tensors], draw: Draw) -> Weights:
        """What a client sends: with noise over its change where the level is ``client``."""
        if self.table.level != "client" or self.table.shared_noise or not sent:
            return sent
        noise = noise_of(self.table, self.train, 1)
        return privatized(sent, start, self.table.clip, noise, Keystream(draw(NOISE)))

    def summands(self, changes: Mapping[str, Vector], step: float, draw: Draw) -> dict[str, Vector]:
        """A client's changes as a sum takes them: clipped together, in whole steps, with its share of the noise.

        Args:
            changes: part -> its change, in the order of the plan.
            step: what the integer 1 stands for.
            draw: the keys of the request's streams.

        Raises:
            UserError: the noise is too small or too large to be drawn in these steps.
        """
        if not self.table.shared_noise:
            return dict(changes)
        deviation = share_of_noise(self.table, noise_of(self.table, self.train, 1)) / step
        norm = math.sqrt(sum(float(change @ change) for change in changes.values()))
        # rounding moves each number by up to half a step, all of them by up to half the root of their count
        longest = self.table.clip - step / 2 * math.sqrt(sum(len(change) for change in changes.values()))
        if longest <= 0:
            raise UserError("[privacy] clip: is below what rounding to whole steps adds; expected a larger one")
        if not math.isfinite(norm):  # as in a message alone
            LOG.warning("the change is not finite and counts as none; %s", DIVERGED)
            changes = {part: np.zeros_like(change) for part, change in changes.items()}
        scale = longest / norm if longest < norm < math.inf else 1.0
        stream = Keystream(draw(NOISE))
        made: dict[str, Vector] = {}
        for part, change in changes.items():
            whole = np.rint(change * (scale / step))
            noised = whole + discrete_gaussian(len(change), math.ceil(deviation), stream)
            made[part] = (noised * step).astype(np.float64)
        return made

    def told(self, reply: Reply) -> Reply:
        """A reply without what no noise covers: its loss; at level ``client`` the number of its examples too."""
        return replace(reply, loss=None, examples=1 if self.table.level == "client" else reply.examples)

    def told_outside(self, reply: Reply) -> Reply:
        """A reply that leaves for another machine: nothing that was counted or timed of the client's rows."""
        steps = 1 if self.table.level == "client" else reply.steps
        return replace(self.told(reply), steps=steps, work=Positions(), flops=0, seconds=0.0)


def private_of(job: Job) -> Private | None:
    """The noise of a job's clients; None without any. Every stage has its own, or two would cancel out."""
    if job.privacy.level == "none":
        return None
    streams, stage = Streams(job.train.seed), f" of {job.stage}" if job.stage else ""

    def draw(request: Request, start: Weights) -> Draw:
        return lambda use: streams.key(request.round, request.client, f"{use}{stage}")

    return Private(job.privacy, job.train, draw)


def _generator(key: bytes) -> np.random.Generator:
    """The generator of a key, for draws of which a message shows none as it is."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(int.from_bytes(key, "little"))))


def samples_of(job: Job) -> Callable[[Request], np.random.Generator] | None:
    """Of a job at level ``example``: a request -> what decides which examples take part in its steps."""
    private = private_of(job)
    if private is None or private.table.level != "example":
        return None
    return lambda request: _generator(private.draw(request, {})(SAMPLE))


def spending(table: Privacy, train: Train, examples: int, rounds: int) -> Spending:
    """What a client with so many examples spends in so many rounds.

    Args:
        table: the job's ``[privacy]``, settled.
        train: the job's ``[train]``.
        examples: the client's training examples.
        rounds: in which it takes part.
    """
    rate, steps, _ = sampling(examples, train) if table.level == "example" else (1.0, 1, 1)
    return Spending(noise_of(table, train, examples), rate, rounds * steps)


def share_of_noise(table: Privacy, noise: float) -> float:
    """Standard deviation of what each client adds to a sum whose noise is ``noise`` times the clip.

    Raises:
        UserError: it is more than a masked sum holds, over a clipped change too, or too little to be drawn.
    """
    deviation = noise * table.clip / math.sqrt(table.honest or 1)
    if not LEAST_SHARE <= deviation <= MOST_SHARE:
        raise UserError(
            f"[privacy] clip: with noise {noise:.3g} each client would add numbers of deviation {deviation:.3g} "
            f"to every weight; a masked sum takes {LEAST_SHARE:g} to {MOST_SHARE:g}. Change, clip and noise grow "
            "together: another clip, or more honest clients, helps"
        )
    if table.clip + FAR * deviation > RANGE:  # who then fails would tell of its change, whatever noise is over it
        raise UserError(
            f"[privacy] clip: is {table.clip:g}, and with noise of deviation {deviation:.3g} over it a number may "
            f"be beyond {RANGE:g}, the largest that a masked sum takes for certain; expected a smaller one"
        )
    return deviation


def noise_of(table: Privacy, train: Train, examples: int) -> float:
    """The noise of a client with so many examples, in units of the clip; calibrated where an epsilon is given."""
    if table.noise is not None:
        return table.noise
    assert table.epsilon is not None
    assert table.participations is not None
    rate, steps, _ = sampling(examples, train) if table.level == "example" else (1.0, 1, 1)
    return calibrate(table.epsilon, table.delta, table.counted_by, rate, steps * table.participations)
