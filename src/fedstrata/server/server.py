"""The server: what it holds, what it sends to whom, and how the replies become the next model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedstrata.plan.kinds import Phase, Tensors, Weights
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.server.aggregate import Aggregate, MakeAggregate, as_held, own_result
from fedstrata.server.clip import change_norm, clipped
from fedstrata.server.journal import Versions
from fedstrata.server.late import Late, moved
from fedstrata.server.mean import WeightedMean
from fedstrata.server.optimizer import AdaptiveOptimizer, ServerOptimizer
from fedstrata.server.robust import RobustAggregate, far_outside
from fedstrata.wire.chain import Chains
from fedstrata.wire.codec import StateCodec, Wire, WireError
from fedstrata.wire.finite import not_finite
from fedstrata.wire.partial import held_back
from fedstrata.wire.pure import pure

HUGE = 1e4
"""No weight of a model that learns is as large."""


class NotFiniteError(ValueError):
    """The model would hold a value that is not finite."""


@dataclass
class Server:
    """What the server knows.

    Attributes:
        parts: the model's parts.
        weights: part -> its current tensors, fp32. A part is replaced, never changed in place.
        wire: how parts travel.
        begin_aggregate: makes a round's aggregate.
        optimizer: what is done with the aggregate.
        versions: part -> how often it has been replaced.
        client_versions: client -> the version that it has of every part, in the model's order; clients that have
            the same share one tuple.
        moments: tensor name -> the optimizer's memory.
        max_norm: to which a client's change is shortened; None: never.
        late: requests of asynchronous rounds that have no answer yet.
        residual: part -> what its messages have left out so far, added to the next.
        chains: what clients hold, where changes travel on the way down; None where whole parts do.
    """

    parts: Parts
    weights: Weights
    wire: Wire = field(default_factory=lambda: Wire(StateCodec("fp32")))
    begin_aggregate: MakeAggregate = WeightedMean
    optimizer: ServerOptimizer = field(default_factory=AdaptiveOptimizer)
    versions: dict[str, int] = field(default_factory=dict)
    client_versions: dict[str, Versions] = field(default_factory=dict)
    moments: dict[str, Tensors] = field(default_factory=dict)
    residual: Weights = field(default_factory=dict)
    max_norm: float | None = None
    late: Late = field(default_factory=Late)

    def __post_init__(self) -> None:
        self.versions = self.versions or dict.fromkeys(self.parts.names, 0)
        self.aggregate = self._begin()
        self.outliers: dict[str, float] = {}
        self.unmoved: list[str] = []
        self._norms: dict[str, float] = {}
        self._unchanged: tuple[str, Tensors] = "", {}
        self._start = (0,) * len(self.parts.names)
        self._moved_clients: dict[str, None] = {}
        self._alike: dict[Versions, Versions] = {}
        self._replied: set[str] = set()
        self._messages: dict[str, tuple[int, tuple[Tensors, Tensors]]] = {}
        self._checked: set[Plan] = set()
        self.chains = Chains(self.wire, self.weights) if self.wire.chained else None

    def request(self, round: int, client: str, plan: Plan, phase: Phase = "train") -> Request:
        """What ``client`` is asked, with the parts it lacks; from now on it counts as holding them."""
        if plan not in self._checked:
            plan.check(self.parts)
            self._checked.add(plan)
        needed = plan.received(self.parts)
        held = dict(zip(self.parts.names, self.client_versions.get(client, self._start), strict=True))
        stale = [part for part in needed if held[part] != self.versions[part]]
        versions = {part: self.versions[part] for part in needed}
        request = Request(
            round, client, plan, phase, versions, {part: self.outgoing(part, held[part]) for part in stale}
        )
        self._holds(client, tuple({**held, **{part: self.versions[part] for part in stale}}.values()))
        return request

    def forget(self, client: str) -> None:
        """A client did not answer: of what it was ever sent it may hold the start model alone."""
        self._holds(client, self._start)

    def take_moved(self) -> dict[str, Versions]:
        """What those clients hold that have been sent something, or forgotten, since this was last asked."""
        moved = {client: self.client_versions[client] for client in self._moved_clients}
        self._moved_clients.clear()
        self._alike.clear()
        return moved

    def _holds(self, client: str, versions: Versions) -> None:
        if self.client_versions.get(client) != versions:
            self.client_versions[client] = self._alike.setdefault(versions, versions)
            self._moved_clients[client] = None

    def outgoing(self, part: str, before: int = 0) -> Tensors:
        """A part as it travels to clients that have version ``before``; encoded once, whatever their number."""
        if self.chains:
            self.received(part)
            return self.chains.message(part, before)
        return self._message(part)[0]

    def held(self, part: str) -> tuple[int, Tensors]:
        """The newest version of a part that any client may have, as it has it; one that is not yet sent is not."""
        if self.chains:
            return self.chains.each[part].version, self.chains.each[part].held
        return self.versions[part], self.received(part)

    def _message(self, part: str) -> tuple[Tensors, Tensors]:
        """A part as it travels, and what that leaves out."""
        version, message = self._messages.get(part, (-1, ({}, {})))
        if version != self.versions[part]:
            message = self.wire.encode(self.weights[part], residual=self.residual.get(part, {}))
            self._messages[part] = self.versions[part], message
        return message

    def received(self, part: str) -> Tensors:
        """The part as clients see it: version 0 exact, later versions after encoding and decoding."""
        if self.chains:
            return self.chains.advance(part, self.versions[part], self.weights[part])
        held = self.weights[part]
        return self.wire.decode(self.outgoing(part), held=held) if self.versions[part] else held

    def unchanged(self, part: str) -> Tensors:
        """The part as it comes back from a client that has learned nothing."""
        if self.wire.changes:
            return self.received(part)
        return self.wire.decode(self.outgoing(part), held=self.weights[part])

    def keep_late(self) -> None:
        """Keep what the clients without an answer train from; to be called before every merge."""
        for part, version in sorted(self.late.needed()):
            if (part, version) not in self.late:
                self.late.keep(part, version, self.outgoing(part, -1))
        self.late.drop()

    def check(self, plan: Plan, reply: Reply) -> None:
        """Refuse a reply that does not hold what the plan sends.

        Raises:
            WireError: names, shapes or types differ, or a value is not finite.
        """
        for part in plan.send:
            try:
                self.wire.check(reply.weights.get(part, {}), self.parts.shapes[part], self.wire.changes)
            except WireError as error:
                raise WireError(f"{part}: {error}") from None

    def accumulate(
        self, plan: Plan, reply: Reply, copies: Mapping[str, Tensors], versions: Mapping[str, int] | None = None
    ) -> None:
        """Check a reply and take it into the round's aggregate.

        Args:
            plan: the client's.
            reply: what it sent.
            copies: its copies of the server's layers, where it had some.
            versions: part -> version that the client started from; None: the current one of all.

        Raises:
            WireError: the reply does not hold what the plan sends.
        """
        self.check(plan, reply)
        for tensors in self._decoded(plan, reply, versions or self.versions):
            self.aggregate.add(tensors, reply.examples, reply.client)
        self._replied.update(plan.send)
        for copy in copies.values():
            self.aggregate.add(copy, reply.examples, reply.client)

    def _decoded(self, plan: Plan, reply: Reply, versions: Mapping[str, int]) -> Iterator[Tensors]:
        """What a client sent, part by part; all at once where its change is shortened."""
        each = (self._decode(part, reply.weights[part], versions[part]) for part in plan.send)
        if self.max_norm is None:
            yield from each
            return
        whole = {name: tensor for tensors in each for name, tensor in tensors.items()}
        self._norms[reply.client] = norm = change_norm(whole, self.reference)
        yield clipped(whole, self.reference, norm, self.max_norm)

    def _decode(self, part: str, message: Tensors, version: int) -> Tensors:
        """A part that a client sent; from an earlier version as :mod:`fedstrata.server.late` says."""
        if version == self.versions[part]:
            old = self.received(part) if self.wire.changes else None
            return self.wire.decode(message, old, self.weights[part])
        base = self.late.unchanged(self.wire, part, version)
        new = self.wire.decode(message, base if self.wire.changes else None, base)
        return moved(new, base, self.unchanged(part), self.versions[part] - version)

    def reference(self, name: str) -> Tensor:
        """A tensor as it comes back from a client that has learned nothing."""
        if name not in self._unchanged[1]:
            part = next(part for part, shapes in self.parts.shapes.items() if name in shapes)
            self._unchanged = part, self.unchanged(part)
        return self._unchanged[1][name]

    def _begin(self) -> Aggregate:
        aggregate = self.begin_aggregate()
        if isinstance(aggregate, RobustAggregate):
            aggregate.reference = self.reference
        return aggregate

    def merge(self) -> list[str]:
        """End a round: move every part that was sent. Returns the parts that changed.

        Who was far outside the others is then in ``outliers``, and what too few have sent in ``unmoved``.

        Raises:
            NotFiniteError: a part would hold a value that is not finite.
            TooFewRepliesError: no part was sent by as many as a robust aggregate needs.
        """
        ended, self.aggregate = self.aggregate, self._begin()
        result = own_result(ended, self.parts.shapes)
        self.outliers = far_outside(self._norms) if self._norms else {}
        self.unmoved = []
        if isinstance(ended, RobustAggregate):
            self.outliers = {**self.outliers, **ended.outliers}
            self.unmoved = [part for part, own in self.parts.shapes.items() if own.keys() & ended.unmoved.keys()]
        self._norms, self._unchanged = {}, ("", {})
        changed = [part for part in self.parts.names if self.parts.shapes[part].keys() & result.keys()]
        for part in changed:
            old = self.weights[part]
            moved = self._moved(part, result) if part in self._replied and not self.wire.lossless else result
            new = {name: self._step(name, old[name], moved[name]) for name in old}
            new = held_back(new, old, self.parts.sharing)
            self.replace(part, new, "train" if self.optimizer_is_plain or part not in self._replied else "server")
        self._replied.clear()
        return changed

    def _moved(self, part: str, aggregate: Tensors) -> Tensors:
        """The clients' change, added to the server's own weights: what the wire rounds off does not move them."""
        old, back = self.weights[part], self.unchanged(part)
        return {
            name: torch.where(back[name] == old[name], aggregate[name], old[name] + (aggregate[name] - back[name]))
            for name in old
        }

    @property
    def optimizer_is_plain(self) -> bool:
        """The server takes the aggregate as it is, so that no rate of its own can be to blame."""
        return getattr(self.optimizer, "plain", False)

    @property
    def suspect(self) -> str:
        """The table whose learning rate is likely to blame where training diverges."""
        if self.optimizer_is_plain:
            return "train"
        largest = max(float(tensor.abs().max()) for own in self.weights.values() for tensor in own.values())
        return "server" if largest > HUGE else "train"

    def replace(self, part: str, new: Tensors, suspect: str = "train") -> None:
        """Make ``new`` the part's next version.

        Raises:
            NotFiniteError: it holds a value that is not finite; the rate of the table ``suspect`` is named.
        """
        if name := not_finite(new):
            raise NotFiniteError(
                f"{name} would hold a number that is not finite; a smaller {suspect}.learning_rate helps, with "
                "--resume from the last finished round"
            )
        version = self.versions[part]
        place = self.parts.names.index(part)
        sent = version and any(held[place] == version for held in self.client_versions.values())
        if sent and not self.chains and (left := self._message(part)[1]):  # version 0 is shipped whole
            self.residual[part] = left
        self.weights[part] = new
        self.versions[part] += 1

    def _step(self, name: str, old: Tensor, aggregate: Tensor) -> Tensor:
        moments = self.moments.get(name, {})
        given, what = old, f"server_optimizer: {type(self.optimizer).__name__}.step"
        if not isinstance(self.optimizer, AdaptiveOptimizer):  # one that moves it in place would move what is held
            given = old.clone()
        with pure(self.optimizer, what, "what is to last in moments"):
            new = as_held(what, name, self.optimizer.step(given, aggregate, moments), old.shape)
        if moments:
            self.moments[name] = moments
        return new
