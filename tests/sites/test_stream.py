"""Split training over streams: the same bits as in one process, and no client can harm the others."""

from __future__ import annotations

import copy
import datetime
import ipaddress
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import save

grpc = pytest.importorskip("grpc")
pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import fedstrata
from fedstrata.client.answer import ClientData, ClientRuntime, Connect, Handlers, Work, answer_request
from fedstrata.client.scorer import FeatureCaches
from fedstrata.client.trainer import drain
from fedstrata.client.working_model import WorkingModel
from fedstrata.errors import UserError
from fedstrata.exchanges.activations import ActivationsHalf
from fedstrata.plan.kinds import Tensors
from fedstrata.plan.messages import Reply, Request
from fedstrata.plan.plan import Plan
from fedstrata.plan.schedule import ScheduleSpan
from fedstrata.runs import train as training
from fedstrata.server.layers import LayerSettings, ServerLayers, SplitSession
from fedstrata.server.server import Server
from fedstrata.sites.activation_client import ActivationClient
from fedstrata.sites.activation_server import ActivationServer
from fedstrata.sites.stream import SessionFailed, StreamHeader, decode_stream_message, encode_stream_message
from fedstrata.tasks.classify import Classify
from fedstrata.wire.codec import WireError
from fedstrata.wire.store import Store
from roles import make_runtime
from roles import weights_of as model_weights
from tiny import saved_models, tiny_model

Jobs = Callable[..., dict[str, Any]]
MODES = ("parallel", "share", "emb-avg", "head-emb-avg")
LONG = 60.0
"""Seconds, for what should not happen."""


@dataclass(frozen=True)
class Papers:
    """A throw-away authority, and the server's certificate and key."""

    ca: bytes
    tls: tuple[bytes, bytes]


def papers_of_new() -> Papers:
    now = datetime.datetime.now(datetime.UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def certificate(of: str, key: Any, extension: x509.ExtensionType) -> bytes:
        made = x509.CertificateBuilder(
            issuer_name=name("test authority"),
            subject_name=name(of),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(days=1),
            not_valid_after=now + datetime.timedelta(days=1),
        ).add_extension(extension, critical=True)
        return made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    secret = own.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Papers(
        ca=certificate("test authority", authority, x509.BasicConstraints(ca=True, path_length=None)),
        tls=(certificate("server", own, x509.SubjectAlternativeName(here)), secret),
    )


@pytest.fixture(scope="session")
def papers() -> Papers:
    return papers_of_new()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_grpc_proxy", "127.0.0.1")


# ---- whole jobs: a test engine whose clients are threads


class Polite:
    """A link that lets others compute while it waits.

    Dropout draws from generators of the process, and here the sites and the server are threads of one. So a site
    computes under the lock of the layers, as the server does, and where it gives the lock up in the middle of a
    batch it takes the generator's state along: none draws from another's stream. Sites in processes of their own
    need nothing of this.
    """

    def __init__(self, link: ActivationClient, lock: Any, begun: Callable[[], None]) -> None:
        self.link, self.lock, self.begun = link, lock, begun

    def begin(self, span: ScheduleSpan) -> None:
        self._wait(self.link.begin, span)
        self.begun()

    def forward(self, message: Tensors) -> Tensors:
        return self._wait(self.link.forward, message)

    def backward(self, message: Tensors) -> Tensors:
        return self._wait(self.link.backward, message)

    def _wait(self, way: Callable[[Any], Any], message: Any) -> Any:
        place = torch.get_rng_state()
        self.lock.release()
        try:
            return way(message)
        finally:
            self.lock.acquire()
            torch.set_rng_state(place)


def runtime_of_its_own(runtime: ClientRuntime) -> ClientRuntime:
    """The same roles over a copy of the model."""
    working = WorkingModel(copy.deepcopy(runtime.working.model), runtime.working.parts)
    trainer, scorer = (replace(role, working=working) for role in (runtime.trainer, runtime.scorer))
    caches = FeatureCaches(working, trainer.task, trainer.train, lambda done, total: None)
    return replace(runtime, working=working, trainer=trainer, scorer=scorer, caches=caches)


class Threads:
    """In place of the local engine: each client has a model, a disk, a thread and a stream of its own."""

    def __init__(
        self,
        *,
        runtimes: Sequence[ClientRuntime],
        handlers: Handlers,
        data: Mapping[str, ClientData],
        shared: Mapping[str, tuple[int, Tensors]],
        connect: Connect,
        papers: Papers,
        backwards: bool = False,
        **_: Any,
    ) -> None:
        half = connect.__self__  # type: ignore[attr-defined]
        assert isinstance(half, ActivationsHalf)
        self.handlers, self.data = handlers, data
        self.layers, self.papers, self.backwards = half.layers, papers, backwards
        self.runtimes = {name: runtime_of_its_own(runtimes[0]) for name in data}
        self.shared = {
            name: {
                part: (version, {n: t.clone() for n, t in own.items()}) for part, (version, own) in shared.items()
            }
            for name in data
        }
        self.server = ActivationServer(self.layers, "127.0.0.1:0", papers.tls, LONG)
        self.tokens = {name: f"token of {name}" for name in data}

    def clients(self) -> list[str]:
        return list(self.data)

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        asked = list(requests)
        self.server.expect(asked, self.tokens)
        replies: SimpleQueue[Reply | Exception] = SimpleQueue()
        threads = []
        for request in reversed(asked) if self.backwards else asked:
            begun = threading.Event()
            threads.append(threading.Thread(target=self._answer, args=(request, replies, begun)))
            threads[-1].start()
            if self.backwards:
                assert begun.wait(LONG)
        for _ in asked:
            reply = replies.get(timeout=LONG)
            if isinstance(reply, Exception):
                raise reply
            yield reply
        for thread in threads:
            thread.join()

    def _answer(self, request: Request, replies: SimpleQueue[Reply | Exception], begun: threading.Event) -> None:
        client, lock = request.client, self.layers.lock
        shared, runtime = self.shared[client], self.runtimes[client]
        address = f"127.0.0.1:{self.server.port}"
        try:
            with ActivationClient(address, request, self.tokens[client], self.papers.ca, LONG) as link, lock:
                for part, sent in request.parts.items():
                    shared[part] = request.versions[part], runtime.wire.decode(sent)
                work = Work(
                    runtime=runtime,
                    request=request,
                    shared=shared,
                    data=self.data[client],
                    callback=lambda *_: None,
                    link=Polite(link, lock, begun.set),
                )
                reply = drain(answer_request(work, self.handlers))
            replies.put(reply)
        except Exception as error:
            replies.put(error)
        finally:
            begun.set()


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch, papers: Papers, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs a job over streams."""
    engines: list[Threads] = []

    def run(job: dict[str, Any], **options: Any) -> fedstrata.Result:
        def made(**given: Any) -> Threads:
            engines.append(Threads(**given, papers=papers, **options))
            return engines[-1]

        with monkeypatch.context() as patch:
            patch.setattr(training, "LocalEngine", made)
            return fedstrata.run({**job, "output": {"dir": str(tmp_path / "there")}})

    yield run
    for engine in engines:
        engine.server.close()


def same_runs(one: fedstrata.Result, other: fedstrata.Result) -> None:
    mine, theirs = (saved_models(run.folder) for run in (one, other))
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert (one.score, one.bytes, one.flops) == (other.score, other.bytes, other.flops)
    ledgers = [sorted((run.folder / "ledger.jsonl").read_text().splitlines()) for run in (one, other)]
    assert ledgers[0] == ledgers[1]
    losses = [
        [line.split('"loss": ')[1].split(",")[0] for line in (run.folder / "rounds.jsonl").read_text().splitlines()
         if '"loss"' in line and '"steps"' in line]
        for run in (one, other)
    ]  # fmt: skip
    assert losses[0] == losses[1]
    assert losses[0]


def split(job: Jobs, mode: str, kind: str = "mlm", **tables: Any) -> dict[str, Any]:
    train = {"dropout": True, "learning_rate": 1e-2, "lr_schedule": "polynomial", **tables.pop("train", {})}
    method = {"mode": mode, **tables.pop("method", {})}
    return job("fedbert", kind, 3, train=train, method=method, **tables)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_are_those_of_one_process(job: Jobs, net: Callable[..., Any], mode: str, dtype: str) -> None:
    made = split(job, mode, wire={"dtype": dtype})
    same_runs(fedstrata.run(made), net(made))


@pytest.mark.parametrize(
    ("mode", "tables"),
    [
        ("parallel", {"clients": {"test": 0.3}, "wire": {"dtype": "fp16"}}),
        (
            "share",
            {
                "clients": {"test": 0.3},
                "wire": {"activations": "int4", "gradients": "int8", "gradients_density": 0.3},
            },
        ),
        ("head-emb-avg", {"clients": {"test": 0.3}, "method": {"lower": 1, "upper": 1}}),
        (
            "emb-avg",
            {
                "clients": {"test": 0.3},
                "wire": {"activations": "int8", "activations_changed": 0.2},
                "train": {"epochs": 2, "dropout": False},
            },
        ),
    ],
)
def test_clients_are_scored_over_streams_too(
    job: Jobs, net: Callable[..., Any], mode: str, tables: dict[str, Any]
) -> None:
    made = split(job, mode, "classify", **tables)
    del made["data"]["test"]
    same_runs(fedstrata.run(made), net(made))


@pytest.mark.parametrize("mode", ["emb-avg", "head-emb-avg"])
@pytest.mark.parametrize("merge", ["plain", "alternate"])
def test_clients_of_different_ranks_take_turns_on_one_model(
    job: Jobs, net: Callable[..., Any], mode: str, merge: str
) -> None:
    """What one of them trains above the other's rank is its own until the round ends."""
    pytest.importorskip("peft", reason="adapters need the extra 'lora'")
    ranks = {"default": 1, "client-0": 3, "client-2": 2}
    adapter = {"kind": "lora", "rank": ranks, "merge": merge}
    made = split(job, mode, "classify", adapter=adapter, method={"lower": 1, "upper": 1})
    same_runs(fedstrata.run(made), net(made))


@pytest.mark.parametrize("mode", ["parallel", "emb-avg"])
def test_who_comes_first_changes_nothing(
    job: Jobs, net: Callable[..., Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of 3, 1 and 2 steps arrive in the order 2, 1, 0; each begins before the next one comes."""
    made = split(job, mode, clients={"count": 3, "partition": "sizes", "sizes": [6, 2, 4]})
    orders: list[dict[str, list[str]]] = []
    forward, begin = SplitSession.forward, SplitSession.begin

    def met(way: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: SplitSession, message: Any) -> Any:
            if self.optimizer and self.request.round == 0:
                orders[-1][way].append(self.request.client)
            return method(self, message)

        return noted

    monkeypatch.setattr(SplitSession, "forward", met("forward", forward))
    monkeypatch.setattr(SplitSession, "begin", met("begin", begin))
    orders.append({"begin": [], "forward": []})
    here = fedstrata.run(made)
    orders.append({"begin": [], "forward": []})
    same_runs(here, net(made, backwards=True))
    assert orders[0]["begin"] == ["client-0", "client-1", "client-2"]
    assert orders[1]["begin"] == ["client-2", "client-1", "client-0"]
    if mode == "emb-avg":
        assert orders[0]["forward"] == orders[1]["forward"] == [f"client-{i}" for i in (0, 1, 2, 0, 2, 0)]


# ---- single sessions: clients that send whatever they like


def layers_in(
    folder: Path, copies: bool, batch_size: int = 4, kept: bool = True, steps: int | None = None
) -> ServerLayers:
    runtime = make_runtime(
        tiny_model("bert", "classify", num_labels=3),
        Classify(0, ("x", "y", "z")),
        batch_size=batch_size,
        steps=steps,
        optimizer_state="persist" if kept else "reset",
    )
    working, trainer = runtime.working, runtime.trainer
    server = Server(working.parts, model_weights(working), runtime.wire)
    settings = LayerSettings(working.parts.layers(0), copies, 64, runtime.stream, Store(folder))
    layers = ServerLayers(working, server, settings, trainer.train, trainer.streams)
    layers.begin(0)
    return layers


def asked(client: str, round: int = 0, phase: str = "train") -> Request:
    plan = Plan((0, 1, 2), ("embeddings", "pooler", "head"), server=("layer.0", "layer.1", "layer.2"))
    return Request(round, client, plan, phase, {}, {})


def states(client: str, step: int, texts: int = 2) -> Tensors:
    rng = torch.Generator().manual_seed(100 * ord(client) + step)
    lengths = torch.tensor([5 + step, 3] * (texts // 2), dtype=torch.int32)
    return {"activations": torch.randn(int(lengths.sum()), 32, generator=rng), "lengths": lengths}


def gradients(client: str, step: int) -> Tensors:
    return {"gradients": states(client, step + 50)["activations"][: 8 + step]}


def batch(link: ActivationClient | SplitSession, client: str, step: int) -> Tensors:
    """One step; the gradients that come back."""
    link.forward(states(client, step))
    return link.backward(gradients(client, step))


class House:
    """Layers behind an activation server, and clients that can connect to it."""

    def __init__(self, layers: ServerLayers, papers: Papers, deadline: float = LONG) -> None:
        self.layers, self.papers = layers, papers
        self.server = ActivationServer(layers, "127.0.0.1:0", papers.tls, deadline)
        self.address = f"127.0.0.1:{self.server.port}"

    def expect(self, *requests: Request) -> None:
        self.server.expect(requests, {request.client: f"token of {request.client}" for request in requests})

    def connect(
        self, request: Request, token: str = "", deadline: float = LONG, ca: bytes | None = b""
    ) -> ActivationClient:
        given = self.papers.ca if ca == b"" else ca
        return ActivationClient(self.address, request, token or f"token of {request.client}", given, deadline)

    def train(
        self,
        who: str | Request,
        steps: int = 1,
        before: Callable[[int], object] = lambda said: None,
        until: int | None = None,
        **options: Any,
    ) -> None:
        """A client's session, canceled after ``until`` messages; ``before`` is called with the number of each."""
        request = asked(who) if isinstance(who, str) else who
        with self.connect(request, **options) as link:
            messages: list[Callable[[], object]] = [partial(link.begin, ScheduleSpan(steps, steps))]
            for step in range(steps):
                messages.append(partial(link.forward, states(request.client, step)))
                messages.append(partial(link.backward, gradients(request.client, step)))
            for said, message in enumerate(messages[:until]):
                before(said)
                message()
            if until is not None:
                raise KeyboardInterrupt

    def raw(self, request: Request, messages: Iterable[bytes]) -> Any:
        """A stream of messages that nobody checks."""
        own = grpc.ssl_channel_credentials(self.papers.ca)
        self.channel = grpc.secure_channel(self.address, own, [("grpc.use_local_subchannel_pool", 1)])
        who = [("client-bin", request.client.encode()), ("token-bin", f"token of {request.client}".encode())]
        who.append(("session", f"{request.round} {request.phase}"))
        return self.channel.stream_stream("/fedstrata.Layers/session")(iter(messages), metadata=who)


@pytest.fixture
def house(papers: Papers, tmp_path: Path) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(copies: bool, deadline: float = LONG, **options: Any) -> House:
        made.append(House(layers_in(tmp_path / f"layers-{len(made)}", copies, **options), papers, deadline))
        return made[-1]

    yield make
    for one in made:
        one.server.close()


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread; what one raises is raised here."""
    errors: list[Exception] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def weights_of(layers: ServerLayers) -> Tensors:
    return {name: tensor for part in layers.end(0).values() for name, tensor in part.items()}


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def alone(folder: Path, copies: bool, order: str, steps: Mapping[str, int]) -> ServerLayers:
    """The layers after batches of these clients in this order; a session ends with its last step."""
    layers = layers_in(folder, copies)
    sessions = {client: layers.open(asked(client)) for client in steps}
    for client, count in steps.items():
        sessions[client].begin(ScheduleSpan(count, count))
    for client in order:
        batch(sessions[client], client, sessions[client].steps)
        if sessions[client].steps == steps[client]:
            layers.close(sessions[client])
    return layers


def wait(until: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not until():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_copies_visited_at_once_are_those_visited_one_by_one(house: Callable[..., House], tmp_path: Path) -> None:
    here = house(copies=True)
    here.expect(asked("a"), asked("b"), asked("c"))
    meet = threading.Barrier(3)
    together(*(lambda c=c: here.train(c, 2, lambda said: meet.wait(LONG)) for c in "abc"))  # type: ignore[misc]
    assert len(here.layers.replicas) == 3, "all three were open at once"
    for client in "abc":
        lone = alone(tmp_path / client, True, client * 2, {client: 2})
        (made, traffic), (expected, counted) = here.layers.collect(client), lone.collect(client)
        assert all(equal(made[part], expected[part]) for part in expected)
        assert traffic == counted
        assert len(lone.replicas) == 1
        kept, remembered = (layers.settings.store.below(client).load(1) for layers in (here.layers, lone))
        assert equal(kept, remembered)
        assert kept
    here.expect(asked("a", 1), asked("b", 1))
    for client in "ab":
        here.train(asked(client, 1))
    assert len(here.layers.replicas) == 3, "they were given back and serve again"


@pytest.mark.parametrize(
    ("said", "token", "complaint"),
    [
        (asked("a"), "token of b", "refuses: client or token is not known"),
        (asked("z"), "token of a", "refuses: client or token is not known"),
        (asked("a", round=1), "", "refuses: this session is not expected"),
        (asked("a", phase="evaluate"), "", "refuses: this session is not expected"),
    ],
)
def test_strangers_and_strange_visits_are_refused(
    house: Callable[..., House], said: Request, token: str, complaint: str
) -> None:
    here = house(copies=False)
    here.expect(asked("a"), asked("b"))
    with pytest.raises(SessionFailed, match=complaint):
        here.train(said, token=token)
    together(lambda: here.train("a"), lambda: here.train("b"))
    with pytest.raises(SessionFailed, match="this session is not expected"):
        here.train("a")
    assert here.layers.results.keys() == {"a", "b"}


def test_a_visit_has_one_stream(house: Callable[..., House]) -> None:
    here = house(copies=True)
    here.expect(asked("a"))
    with here.connect(asked("a")) as link:
        link.begin(ScheduleSpan(1, 1))
        with pytest.raises(SessionFailed, match="not expected"):
            here.train("a")
        batch(link, "a", 0)
    assert here.layers.collect("a")[0]


def test_nothing_goes_in_plain_text_or_to_a_server_of_unknown_signature(house: Callable[..., House]) -> None:
    here = house(copies=True)
    here.expect(asked("a"))
    for ca in (None, papers_of_new().ca):
        with pytest.raises(SessionFailed, match="cannot be reached"):
            here.train("a", ca=ca)
    assert here.server.sessions["a"].stream is None
    here.train("a")


def test_an_address_in_use_is_told_in_a_sentence(house: Callable[..., House], papers: Papers) -> None:
    here = house(copies=True)
    with pytest.raises(UserError, match=f"cannot listen on {here.address}"):
        ActivationServer(here.layers, here.address, papers.tls, LONG)


def test_who_breaks_off_is_as_if_it_had_not_come_where_each_has_a_copy(
    house: Callable[..., House], tmp_path: Path
) -> None:
    here = house(copies=True)
    here.expect(asked("a"), asked("b"))
    with pytest.raises(KeyboardInterrupt):
        here.train("a", 2, until=4)
    assert here.server.sessions["a"].released.wait(LONG)
    here.train("b", 2)
    assert here.layers.results.keys() == {"b"}
    assert len(here.layers.replicas) == 1, "the copy was given back"
    lone = alone(tmp_path / "lone", True, "bb", {"b": 2})
    made, expected = here.layers.collect("b")[0], lone.collect("b")[0]
    assert all(equal(made[part], expected[part]) for part in expected)
    assert not here.layers.settings.store.below("a").load(1)


@pytest.mark.parametrize("between", [False, True])
def test_who_breaks_off_is_no_longer_waited_for(
    house: Callable[..., House], tmp_path: Path, between: bool
) -> None:
    """b makes one of its three steps and goes, after or in the middle of a batch."""
    here = house(copies=False)
    here.expect(asked("a"), asked("b"), asked("c"))

    def breaks() -> None:
        with pytest.raises(KeyboardInterrupt):
            here.train("b", 3, until=4 if between else 3)

    together(lambda: here.train("c", 2), breaks, lambda: here.train("a", 3))
    expected = alone(tmp_path / "lone", False, "abcaca", {"a": 3, "b": 3, "c": 2})
    assert here.layers.results.keys() == {"a", "c"}
    assert equal(weights_of(here.layers), weights_of(expected))


def test_who_comes_late_is_waited_for_and_who_is_given_up_is_not(
    house: Callable[..., House], tmp_path: Path
) -> None:
    here = house(copies=False)
    here.expect(asked("a"), asked("b"))
    worker = threading.Thread(target=here.train, args=("b", 2))
    worker.start()
    wait(lambda: here.server.sessions["b"].steps)
    time.sleep(0.1)
    assert here.server.sessions["b"].taken == 0
    here.server.drop("a")
    worker.join(LONG)
    assert equal(weights_of(here.layers), weights_of(alone(tmp_path / "lone", False, "bb", {"b": 2})))
    with pytest.raises(SessionFailed, match="not expected"):
        here.train("a")


def test_who_does_not_connect_in_time_is_not_waited_for_and_may_still_come(house: Callable[..., House]) -> None:
    """One site that was away kept all others from their second batch, until all had missed the deadline."""
    here = house(copies=False, deadline=1.0)
    here.expect(asked("a"), asked("b"))
    started = time.monotonic()
    here.train("b", 3)
    assert 0.5 < time.monotonic() - started < LONG
    here.train("a", 2)
    assert here.layers.results.keys() == {"a", "b"}


def test_who_was_away_before_is_not_waited_for_nor_until_it_has_caught_up(
    house: Callable[..., House], tmp_path: Path
) -> None:
    """a, of two steps, comes when b has made two of its three."""
    here = house(copies=False)
    request = asked("a")
    here.server.expect((request, asked("b")), {"a": "token of a", "b": "token of b"}, late={"a"})

    def b_waits(said: int) -> None:
        if said == 5:
            wait(lambda: here.server.sessions["a"].steps)

    def a_comes() -> None:
        wait(lambda: here.server.sessions["b"].taken == 2)
        here.train(request, 2)

    together(lambda: here.train("b", 3, b_waits), a_comes)
    expected = alone(tmp_path / "lone", False, "bbaba", {"a": 2, "b": 3})
    assert equal(weights_of(here.layers), weights_of(expected))


def test_who_is_given_up_while_it_waits_hears_of_it(house: Callable[..., House]) -> None:
    here = house(copies=False)
    here.expect(asked("a"), asked("b"))
    heard: list[str] = []

    def train() -> None:
        with pytest.raises(SessionFailed) as caught:
            here.train("b")
        heard.append(str(caught.value))

    thread = threading.Thread(target=train)
    thread.start()
    wait(lambda: here.server.sessions["b"].steps)
    here.server.drop("b")
    thread.join(LONG)
    assert "canceled the session: the client was dropped" in heard[0]
    here.train("a")
    assert here.layers.results.keys() == {"a"}


def test_who_is_given_up_while_the_layers_compute_leaves_nothing(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = house(copies=True)
    here.expect(asked("a"))
    computing, go_on = threading.Event(), threading.Event()
    backward = SplitSession.backward

    def slow(self: SplitSession, message: Tensors) -> Tensors:
        computing.set()
        assert go_on.wait(LONG)
        return backward(self, message)

    monkeypatch.setattr(SplitSession, "backward", slow)

    def train() -> None:
        with pytest.raises(SessionFailed):
            here.train("a")

    thread = threading.Thread(target=train)
    thread.start()
    assert computing.wait(LONG)
    dropping = threading.Thread(target=here.server.drop, args=("a",))
    dropping.start()
    dropping.join(0.1)
    assert dropping.is_alive(), "the layers are still in use"
    go_on.set()
    dropping.join(LONG)
    assert here.server.sessions["a"].released.is_set()
    assert not here.layers.replicas[0].in_use
    assert not here.layers.results
    thread.join(LONG)


@pytest.mark.parametrize("takes", [True, False])
def test_who_is_silent_is_broken_off(house: Callable[..., House], takes: bool) -> None:
    """It sends no more, or does not even take an answer, which is larger than what the connection holds."""
    here = house(copies=False, deadline=1.0, batch_size=800)
    here.expect(asked("a"), asked("b"))
    if takes:
        link = here.connect(asked("a"))
        link.begin(ScheduleSpan(2, 2))
        link.forward(states("a", 0))
    else:
        hold = threading.Event()

        def messages() -> Iterator[bytes]:
            yield begin()
            yield encode_stream_message(StreamHeader("forward"), states("a", 55, 800))
            hold.wait(LONG)

        stream = here.raw(asked("a"), messages())
    started = time.monotonic()
    here.train("b")
    assert 0.5 < time.monotonic() - started < LONG
    assert here.layers.results.keys() == {"b"}
    if takes:
        with pytest.raises(SessionFailed, match="silent for too long"):
            link.backward(gradients("a", 0))
        link.cancel()
    else:
        hold.set()
        stream.cancel()
        here.channel.close()


def test_to_wait_for_ones_turn_is_not_silence(house: Callable[..., House]) -> None:
    here = house(copies=False, deadline=1.5)
    here.expect(asked("a"), asked("b"))
    times: list[float] = []
    together(
        lambda: here.train("b", before=lambda said: times.append(time.monotonic())),
        lambda: here.train("a", before=lambda said: time.sleep(0.8)),
    )
    assert times[2] - times[1] > 1.5
    assert here.layers.results.keys() == {"a", "b"}


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(house: Callable[..., House]) -> None:
    here = house(copies=False)
    here.expect(asked("a"), asked("b"))
    with pytest.raises(SessionFailed, match=r"did not answer within 0\.3 s"):
        here.train("b", deadline=0.3)
    here.train("a")
    assert here.server.sessions["b"].released.wait(LONG)


def test_a_server_that_is_gone_is_told_in_a_sentence(house: Callable[..., House]) -> None:
    here = house(copies=True)
    here.expect(asked("a"))
    with pytest.raises(SessionFailed, match=f"^the server at {here.address} ") as caught:
        here.train("a", before=lambda said: said and here.server.close())
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__
    with pytest.raises(SessionFailed, match="cannot be reached"):
        here.train("a")


def begin(**changes: Any) -> bytes:
    given = {"steps": 1, "epoch": 1, "begin": 0.0, "end": 1.0, **changes}
    return save({}, {"header": json.dumps({"kind": "begin", "span": given})})


FORWARD_GRADIENTS = encode_stream_message(StreamHeader("forward"), gradients("a", 0))
WRONG_LENGTH = encode_stream_message(StreamHeader("backward"), gradients("a", 1))
EXTRA_TENSOR = encode_stream_message(StreamHeader("forward"), states("a", 0) | {"x": torch.ones(1)})
FORWARD = encode_stream_message(StreamHeader("forward"), states("a", 0))
BACKWARD = encode_stream_message(StreamHeader("backward"), gradients("a", 0))
END = encode_stream_message(StreamHeader("end"), {})


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([b""], "not a message of a session"),
        ([b"\xff" * 40], "not a message of a session"),
        ([save({"x": torch.ones(1)})], "not a message of a session"),
        ([save({}, {"header": '{"kind": "forward", "span": null, "more": 1}'})], "not a message of a session"),
        ([save({}, {"header": '{"kind": "forward", "span": [1]}'})], "not a message of a session"),
        ([save({}, {"header": '{"kind": "forward"}'})], "not a message of a session"),
        ([begin(more=1)], "not a message of a session"),
        ([begin(begin=-0.1)], "not a message of a session"),
        ([FORWARD], "forward: cannot come now; expected begin"),
        ([END], "end: cannot come now; expected begin"),
        ([begin(steps=0)], "not a message of a session"),
        ([begin(end=0.5)], "begin: another share"),
        ([save({"x": torch.ones(1)}, {"header": '{"kind": "end", "span": null}'})], "tensors with neither"),
        ([begin(), begin()], "begin: cannot come now; expected forward"),
        ([begin(), BACKWARD], "backward: cannot come now; expected forward"),
        ([begin(), END], "end: cannot come now; expected forward"),
        ([begin(), FORWARD, FORWARD], "forward: cannot come now; expected backward"),
        ([begin(), FORWARD, BACKWARD, FORWARD], "forward: cannot come now; expected end"),
        ([begin(), FORWARD_GRADIENTS], "lengths"),
        ([begin(), EXTRA_TENSOR], "names differ"),
        ([begin(), FORWARD, WRONG_LENGTH], "gradients: is"),
        (
            [
                begin(),
                encode_stream_message(
                    StreamHeader("forward"), states("a", 0) | {"activations": torch.full((8, 32), torch.nan)}
                ),
            ],
         "not finite"),
    ],
)  # fmt: skip
def test_what_is_no_message_ends_its_own_stream_alone(
    house: Callable[..., House], messages: list[bytes], complaint: str
) -> None:
    here = house(copies=False)
    here.expect(asked("a"), asked("b"))
    stream = here.raw(asked("a"), messages)
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert complaint in caught.value.details()
    here.train("b")
    assert here.layers.results.keys() == {"b"}
    here.channel.close()


def test_a_message_of_many_tensors_is_refused_before_any_is_made() -> None:
    """One of half a million, 31 MB, kept the server busy for 19 seconds and took 660 MB of its memory."""
    many = {f"{i}": torch.empty(0) for i in range(1000)}
    with pytest.raises(WireError, match="its head is longer than 16384 bytes"):
        decode_stream_message(encode_stream_message(StreamHeader("forward"), many))


def test_no_client_takes_more_steps_on_shared_layers_than_the_job_has(house: Callable[..., House]) -> None:
    """It would move the layers alone, once the others had taken their steps."""
    here = house(copies=False, steps=2)
    here.expect(asked("a"), asked("b"))
    stream = here.raw(asked("a"), [begin(steps=3)])
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.details() == "begin: 3 steps, and a round has at most 2 (train.steps)"
    here.train("b", 2)
    assert here.layers.results.keys() == {"b"}
    here.channel.close()


def test_a_message_larger_than_any_batch_is_not_taken(house: Callable[..., House]) -> None:
    here = house(copies=True)
    here.expect(asked("a"))
    link = here.connect(asked("a"))
    link.begin(ScheduleSpan(1, 1))
    with pytest.raises(SessionFailed, match=r"refuses: .*larger than max"):
        link.forward({"activations": torch.zeros(2**20)})
    link.cancel()


def test_a_failure_of_the_layers_tells_a_client_nothing_else(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = house(copies=True)
    here.expect(asked("a"))

    def fails(self: SplitSession, message: Tensors) -> Tensors:
        raise RuntimeError("secret")

    monkeypatch.setattr(SplitSession, "forward", fails)
    with pytest.raises(SessionFailed) as caught:
        here.train("a")
    assert "the layers failed" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text
    assert not here.layers.replicas[0].in_use


def test_one_message_is_under_way_at_most(house: Callable[..., House], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends without waiting fills what the connection holds, not the server's memory."""
    here = house(copies=True, batch_size=800)
    here.expect(asked("a"))
    go_on = threading.Event()
    forward = SplitSession.forward
    held: list[int] = []

    def slow(self: SplitSession, message: Tensors) -> Tensors:
        held.append(len(message))
        assert go_on.wait(LONG)
        return forward(self, message)

    monkeypatch.setattr(SplitSession, "forward", slow)
    sent: list[int] = []
    large = encode_stream_message(StreamHeader("forward"), states("a", 55, 800))

    def flood() -> Iterator[bytes]:
        yield begin()
        for i in range(100):
            sent.append(i)
            yield large

    stream = here.raw(asked("a"), flood())
    wait(lambda: held)
    time.sleep(0.5)
    assert len(large) > 2**21
    assert len(sent) < 10
    go_on.set()
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert "forward: cannot come now; expected backward" in caught.value.details()
    assert len(held) == 1
    here.channel.close()


def test_messages_come_back_as_they_were_on_memory_of_torchs_own() -> None:
    sent = {**states("a", 3), "scale": torch.ones(1), "half": torch.ones(3, dtype=torch.bfloat16)}
    header, back = decode_stream_message(encode_stream_message(StreamHeader("forward"), sent))
    assert header == StreamHeader("forward")
    assert back.keys() == sent.keys()
    assert all(torch.equal(back[name], sent[name]) and back[name].dtype == sent[name].dtype for name in sent)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in back.values())
    assert issubclass(SessionFailed, WireError)


def test_scores_need_no_turns_and_leave_no_weights(house: Callable[..., House]) -> None:
    here = house(copies=False)
    here.expect(*(asked(client, phase="evaluate") for client in "ab"))
    out = []
    for client in "ba":
        with here.connect(asked(client, phase="evaluate")) as link:
            out.append(link.forward(states("a", 0))["activations"])
            link.forward(states(client, 1))
    assert torch.equal(*out)
    made, traffic = here.layers.collect("a")
    assert made == {}
    assert set(traffic) == {("up", "activations"), ("down", "activations")}
    here.expect(asked("a", phase="evaluate"))
    link = here.connect(asked("a", phase="evaluate"))
    link.forward(states("a", 0))
    with pytest.raises(SessionFailed, match="backward: cannot come now; expected forward or end"):
        link.backward(gradients("a", 0))
    link.cancel()


def test_a_late_visit_is_not_taken_for_the_next(house: Callable[..., House]) -> None:
    here = house(copies=False)
    here.expect(asked("a"))
    late = here.connect(asked("a"))
    late.begin(ScheduleSpan(1, 1))
    here.server.drop("a")
    here.layers.begin(1)
    here.expect(asked("a", 1))
    with pytest.raises(SessionFailed, match="canceled the session"):
        late.forward(states("a", 0))
    late.cancel()
    with pytest.raises(SessionFailed, match="this session is not expected"), here.connect(asked("a")) as former:
        former.begin(ScheduleSpan(1, 1))
    here.train(asked("a", 1))
    assert here.layers.results.keys() == {"a"}
