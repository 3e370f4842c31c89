"""Robust aggregates: rules by which a few bad replies do not decide what the round comes to.

Every client counts once, whatever number of examples it says that it has. A rule is used on each set of parts that
the same clients have sent; parts whose senders are too few for it stay as they are.

    median          of every entry the middle value, or the mean of the two middle ones (Yin et al. 2018)
    trimmed_mean    of every entry the mean without the f least and the f largest values (Yin et al. 2018)
    krum            the reply with the least sum of squared distances to its n - f - 2 nearest ones (Blanchard et
                    al. 2017)
    multi_krum      the mean of the n - f replies for which that sum is least
    centered_clip   from no change on, ``steps`` times v <- v + mean of (x - v) min(1, radius / |x - v|)
                    (Karimireddy et al. 2021); without a radius that is the median of the |x - v|, in every step

The replies wait on the disk until the round's end, and are read back in pieces: the memory needed is that of the
result and a few megabytes. Sums are taken in fp64 and in an order of their own, so that no number of threads
changes a bit.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedstrata.errors import plural
from fedstrata.job.aggregate_rules import least_senders
from fedstrata.plan.kinds import Tensors
from fedstrata.wire.files import named
from fedstrata.wire.on_disk import content, let_go

PIECE = 1 << 18
"""Numbers that are read back at a time, of all clients together."""
OUTSIDE = 3.0
"""A client is far outside the others if it is more than so many times as far from the result as the median one."""
MOST_TIMES = 1e9
"""Largest multiple of the median distance that is recorded."""

Reference = Callable[[str], torch.Tensor]
"""Name of a tensor -> it as it comes back from a client that has learned nothing, fp32."""


class TooFewRepliesError(ValueError):
    """Not one part was sent by as many clients as the rule needs."""


@dataclass(frozen=True)
class RobustSettings:
    """Settings of ``[server]``.

    Attributes:
        malicious: f, the number of bad clients that a rule is to bear.
        clip_radius: of ``centered_clip``; None for the median distance.
        clip_steps: of ``centered_clip``.
    """

    malicious: int = 1
    clip_radius: float | None = None
    clip_steps: int = 3


@dataclass
class StoredReplies:
    """Tensors of many clients in one file without a name, which is gone when it is closed.

    Attributes:
        folder: on whose disk; None for that of temporary files.
        places: tensor name -> client -> where it begins in the file.
        shapes: tensor name -> its shape.
    """

    folder: Path | None
    places: dict[str, dict[str, int]] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  (it lives as long as the round)

    def __del__(self) -> None:
        self.file.close()

    def add(self, tensors: Mapping[str, torch.Tensor], client: str) -> None:
        """Write a client's tensors, fp32."""
        with named(self.folder or Path(tempfile.gettempdir())):
            for name, tensor in tensors.items():
                self.places.setdefault(name, {})[client] = self.file.tell()
                self.shapes[name] = tensor.shape
                self.file.write(content(tensor.detach().cpu().contiguous()))
                let_go([tensor])
            self.file.flush()

    def groups(self) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        """Clients, in the order in which they came, and the tensors that exactly these have sent."""
        found: dict[tuple[str, ...], list[str]] = {}
        for name, places in self.places.items():
            found.setdefault(tuple(places), []).append(name)
        yield from found.items()

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """A tensor piece by piece: where the piece begins, and it from every client, ``[n, k]`` fp32."""
        places, total = list(self.places[name].values()), self.shapes[name].numel()
        step = max(1, PIECE // len(places))
        for begin in range(0, total, step):
            size = 4 * min(step, total - begin)
            rows = [os.pread(self.file.fileno(), size, place + 4 * begin) for place in places]
            yield begin, torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.float32).view(len(places), -1)


@dataclass
class RobustAggregate:
    """A round's replies under one of the rules; see :class:`fedstrata.server.aggregate.Aggregate`.

    Attributes:
        rule: its name.
        settings: of the rule.
        folder: on whose disk the replies wait.
        reference: set by the server before the first reply.
        outliers: client far outside the others -> how many times as far as the median one, as :func:`far_outside`.
        unmoved: tensors that too few have sent -> how many; they are not in the result.
    """

    rule: str
    settings: RobustSettings = RobustSettings()
    folder: Path | None = None
    reference: Reference | None = None
    outliers: dict[str, float] = field(default_factory=dict, init=False)
    unmoved: dict[str, int] = field(default_factory=dict, init=False)
    replies: StoredReplies | None = field(default=None, init=False)

    def add(self, tensors: Mapping[str, torch.Tensor], weight: int, client: str) -> None:
        """Keep a client's tensors until the round's end; ``weight`` plays no part."""
        self.replies = self.replies or StoredReplies(self.folder)
        self.replies.add(tensors, client)

    def result(self) -> Tensors:
        """The result of every tensor that enough have sent.

        Raises:
            TooFewRepliesError: there are replies, and too few of every part.
        """
        result, least = Tensors(), least_senders(self.rule, self.settings.malicious)
        most: tuple[str, ...] = ()
        for clients, names in self.replies.groups() if self.replies else ():
            most = max(most, clients, key=len)
            if len(clients) < least:
                self.unmoved |= dict.fromkeys(names, len(clients))
            else:
                result |= self._merge(clients, names)
        if most and not result:
            raise TooFewRepliesError(
                f"{plural(len(most), 'client')} sent the same part, and [server] aggregate = {self.rule!r} needs "
                f"{least}; --resume asks again"
            )
        return result

    def _merge(self, clients: Sequence[str], names: Sequence[str]) -> Tensors:
        """The result of tensors that the same clients have sent; who of them is far outside is remembered."""
        assert self.replies is not None
        shares = None
        if self.rule in ("krum", "multi_krum", "centered_clip"):
            shares = SHARES[self.rule](self._products(names), self.settings)
        merged, squares = Tensors(), torch.zeros(len(clients), dtype=torch.float64)
        for name in names:
            new = torch.empty(self.replies.shapes[name])
            own = self._reference(name).reshape(-1)
            for begin, rows in self.replies.pieces(name):
                piece = slice(begin, begin + rows.shape[1])
                if shares is None:
                    values = _by_entry(rows, self.settings.malicious if self.rule == "trimmed_mean" else None)
                else:
                    values = _combined(rows, own[piece], shares)
                new.view(-1)[piece] = values
                squares += _row_sums((rows.double() - new.view(-1)[piece].double()).square_())
            merged[name] = new
        for client, times in far_outside(dict(zip(clients, squares.sqrt().tolist(), strict=True))).items():
            self.outliers[client] = max(times, self.outliers.get(client, 0.0))
        return merged

    def _products(self, names: Sequence[str]) -> torch.Tensor:
        """The inner products of the clients' changes, ``[n, n]`` fp64."""
        assert self.replies is not None
        total = torch.zeros((), dtype=torch.float64)
        for name in names:
            own = self._reference(name).reshape(-1)
            for begin, rows in self.replies.pieces(name):
                change = rows.double() - own[begin : begin + rows.shape[1]].double()
                total = total + torch.stack([_row_sums(change * row) for row in change])
        return total

    def _reference(self, name: str) -> torch.Tensor:
        assert self.reference is not None
        return self.reference(name)


def far_outside(distances: Mapping[str, float]) -> dict[str, float]:
    """Clients that are more than :data:`OUTSIDE` times as far off as the median one -> how many times."""
    middle = statistics.median(distances.values())
    times = {client: own / middle if middle else MOST_TIMES * (own > 0) for client, own in distances.items()}
    return {client: min(many, MOST_TIMES) for client, many in times.items() if many > OUTSIDE}


def _by_entry(rows: torch.Tensor, trimmed: int | None) -> torch.Tensor:
    """Of every column of ``[n, k]`` the mean without the ``trimmed`` least and largest; None: the median."""
    count = len(rows)
    left_out = (count - 1) // 2 if trimmed is None else trimmed
    middle = rows.sort(0).values[left_out : count - left_out].double()
    total = middle[0].clone()
    for row in middle[1:]:
        total += row
    return (total / len(middle)).float()


def _combined(rows: torch.Tensor, own: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """The sum of the rows by their shares, and of what a client that has learned nothing sends by the rest."""
    if 1.0 in shares:
        return rows[shares.index(1.0)]
    total = own.double()
    for row, share in zip(rows, shares, strict=True):
        if share:
            total = total + share * (row.double() - own.double())
    return total.float()


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each of several rows. Of more than one row torch leaves each to one thread."""
    return rows.sum(1)


# Shares: products of the clients' changes ``[n, n]`` -> the share of each client's change in the result


def _nearest(products: torch.Tensor, malicious: int) -> list[int]:
    """The clients, first the one whose n - f - 2 nearest are closest; of equal ones the first."""
    squares = products.diagonal()
    distances = (squares[:, None] + squares[None] - 2 * products).clamp(min=0).tolist()
    count = len(distances) - malicious - 2
    scores = [sum(sorted(own[:place] + own[place + 1 :])[:count]) for place, own in enumerate(distances)]
    return sorted(range(len(scores)), key=lambda place: (scores[place], place))


def _krum(products: torch.Tensor, settings: RobustSettings) -> list[float]:
    chosen = _nearest(products, settings.malicious)[0]
    return [float(place == chosen) for place in range(len(products))]


def _multi_krum(products: torch.Tensor, settings: RobustSettings) -> list[float]:
    chosen = _nearest(products, settings.malicious)[: len(products) - settings.malicious]
    return [(place in chosen) / len(chosen) for place in range(len(products))]


def _centered_clip(products: torch.Tensor, settings: RobustSettings) -> list[float]:
    """The center is a sum of the changes in every step, so that its distances follow from their products."""
    count = len(products)
    table = products.tolist()
    shares = [0.0] * count
    for _ in range(settings.clip_steps):
        along = [sum(share * own[other] for other, share in enumerate(shares)) for own in table]
        within = sum(share * inner for share, inner in zip(shares, along, strict=True))
        squares = [table[place][place] - 2 * along[place] + within for place in range(count)]
        distances = [max(square, 0.0) ** 0.5 for square in squares]
        radius = statistics.median(distances) if settings.clip_radius is None else settings.clip_radius
        taken = [1.0 if own <= radius else radius / own for own in distances]
        rest = 1 - sum(taken) / count
        shares = [rest * share + own / count for share, own in zip(shares, taken, strict=True)]
    return shares


SHARES: Mapping[str, Callable[[torch.Tensor, RobustSettings], list[float]]] = {
    "krum": _krum,
    "multi_krum": _multi_krum,
    "centered_clip": _centered_clip,
}
"""Rule -> the share of each client's change."""
