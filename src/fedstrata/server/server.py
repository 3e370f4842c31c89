"""The server: what it holds, what it sends to whom, and how the answers become the next model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.parts import Parts
from fedstrata.plan.plan import Plan
from fedstrata.wire.codec import carry, check, dequantize

RATES = {"sgd": 1.0, "momentum": 1.0, "adam": 0.01, "yogi": 0.01, "adagrad": 0.01}
"""Server rule -> its learning rate where the job names none."""


@dataclass(frozen=True)
class ServerOptimizer:
    """How the weighted mean of the answers moves the server's weights."""

    name: str = "sgd"
    learning_rate: float | None = None
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3


class WeightedMean:
    """A running mean of tensors, weighted by examples; memory does not grow with the number of clients."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[str, int] = {}

    def add(self, tensors: Mapping[str, torch.Tensor], examples: int) -> None:
        """Take in one client's tensors. Sums are fp64: a weight times a count is exact in it."""
        for name, tensor in tensors.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros(tensor.shape, dtype=torch.float64)
            self.sums[name].add_(tensor, alpha=examples)
            self.weights[name] = self.weights.get(name, 0) + examples

    def result(self) -> Tensors:
        """The mean over those that sent each tensor, fp32."""
        return {name: (total / self.weights[name]).float() for name, total in self.sums.items()}


def step(rule: ServerOptimizer, old: torch.Tensor, mean: torch.Tensor, moments: Tensors) -> torch.Tensor:
    """One tensor's next value.

    FedAvg takes the mean; the others treat ``mean - old`` as a gradient (Reddi et al. 2021, Algorithm 2; FedAvgM:
    Hsu et al. 2019). ``moments`` is the rule's memory of this tensor, changed in place; the second moment starts
    at tau squared.
    """
    if rule.name == "sgd" and rule.learning_rate in (None, 1.0):
        return mean
    rate = RATES[rule.name] if rule.learning_rate is None else rule.learning_rate
    delta = mean - old
    if rule.name == "sgd":
        return old + rate * delta
    first = moments.get("first", torch.zeros_like(old))
    if rule.name == "momentum":
        moments["first"] = rule.momentum * first + delta
        return old + rate * moments["first"]
    beta1 = 0.0 if rule.name == "adagrad" else rule.momentum
    second = moments.get("second", torch.full_like(old, rule.tau**2))
    square = delta**2
    moments["first"] = beta1 * first + (1 - beta1) * delta
    moments["second"] = {
        "adam": lambda: rule.beta2 * second + (1 - rule.beta2) * square,
        "yogi": lambda: second - (1 - rule.beta2) * square * torch.sign(second - square),
        "adagrad": lambda: second + square,
    }[rule.name]()
    return old + rate * moments["first"] / (moments["second"].sqrt() + rule.tau)


@dataclass
class Server:
    """What the server knows.

    Attributes:
        parts: the model's parts.
        weights: part -> its current tensors, fp32. A part is replaced, never changed in place.
        rule: the server rule.
        dtype: the wire type.
        versions: part -> how often it has been merged.
        held: client -> part -> the version the client has.
        moments: tensor name -> the rule's memory.
        rest: part -> what its messages have left out so far, added to the next.
    """

    parts: Parts
    weights: dict[str, Tensors]
    rule: ServerOptimizer = field(default_factory=ServerOptimizer)
    dtype: str = "fp32"
    versions: dict[str, int] = field(default_factory=dict)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    moments: dict[str, Tensors] = field(default_factory=dict)
    rest: dict[str, Tensors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = self.versions or dict.fromkeys(self.parts.names, 0)
        self.mean = WeightedMean()
        self._messages: dict[str, tuple[int, tuple[Tensors, Tensors]]] = {}

    def request(self, round: int, client: str, plan: Plan, phase: str = "train") -> Request:
        """What ``client`` is asked, with the parts it lacks; from now on it counts as holding them."""
        plan.check(self.parts)
        held = self.held.setdefault(client, dict.fromkeys(self.parts.names, 0))
        missing = stale_parts(self.parts, plan, held, self.versions)
        held.update({part: self.versions[part] for part in missing})
        versions = {part: self.versions[part] for part in shared(self.parts, plan)}
        return Request(round, client, plan, phase, versions, {part: self.outgoing(part) for part in missing})

    def forget(self, client: str) -> None:
        """A client did not answer: of what it was ever sent it may hold the start model alone."""
        self.held[client] = dict.fromkeys(self.parts.names, 0)

    def outgoing(self, part: str) -> Tensors:
        """A part as it travels; converted once per version, whatever the number of clients."""
        return self._message(part)[0]

    def _message(self, part: str) -> tuple[Tensors, Tensors]:
        """A part as it travels, and what that leaves out."""
        version, message = self._messages.get(part, (-1, ({}, {})))
        if version != self.versions[part]:
            message = carry(self.weights[part], self.dtype, self.rest.get(part, {}))
            self._messages[part] = self.versions[part], message
        return message

    def received(self, part: str) -> Tensors:
        """A part as up-to-date clients have it: the start model as it is, later versions off the wire."""
        return dequantize(self.outgoing(part)) if self.versions[part] else self.weights[part]

    def collect(self, plan: Plan, reply: Reply, copied: Mapping[str, Tensors] = MappingProxyType({})) -> None:
        """Check a reply and take it into the running mean, with the client's ``copied`` layers of the server.

        Raises:
            WireError: the reply does not hold what the plan sends.
        """
        for part in plan.send:
            check(reply.weights.get(part, {}), self.parts.shapes[part], self.dtype)
        for part in plan.send:
            self.mean.add(dequantize(reply.weights[part]), reply.examples)
        for own in copied.values():
            self.mean.add(own, reply.examples)

    def merge(self) -> list[str]:
        """End a round: move every part that was sent, forget the answers. Returns the parts that changed."""
        mean, self.mean = self.mean.result(), WeightedMean()
        changed = [part for part in self.parts.names if self.parts.shapes[part].keys() & mean.keys()]
        for part in changed:
            old = self.weights[part]
            self.replace(part, {name: step(self.rule, old[name], mean[name], self._memory(name)) for name in old})
        return changed

    def replace(self, part: str, new: Tensors) -> None:
        """Make ``new`` the part's next version."""
        version = self.versions[part]
        sent = version and any(held[part] == version for held in self.held.values())  # version 0 is shipped whole
        if sent and (left := self._message(part)[1]):
            self.rest[part] = left
        self.weights[part] = new
        self.versions[part] += 1

    def _memory(self, name: str) -> Tensors:
        return {} if self.rule.name == "sgd" else self.moments.setdefault(name, {})


def shared(parts: Parts, plan: Plan) -> list[str]:
    """The parts of the plan's local model that come from the server."""
    return [part for part in plan.builds(parts) if part not in plan.keep]


def stale_parts(parts: Parts, plan: Plan, held: Mapping[str, int], versions: Mapping[str, int]) -> list[str]:
    """The parts a client must be sent for a plan: the shared ones whose current version it does not have."""
    return [part for part in shared(parts, plan) if held[part] != versions[part]]
