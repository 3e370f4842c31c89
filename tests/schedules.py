"""Runs between sites over a simulated network that loses, delays, doubles and reorders, while sites, server and
clocks fail; Hypothesis draws what happens when. ``make schedules`` plays many, ``tests/sites/test_schedules.py`` a
few.

The server's run has a thread of its own, which goes on only from one poll to the next; everything else happens in
between. Seconds are simulated. When the rules have ended the network is whole again, so the run must come to its
end, in the bits of a run in one process in which the same clients replied in the same rounds. Where sites keep
something from round to round, its clients also train in vain where a site did, and lose what they keep where a
site lost its disk.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as some
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_in_memory import NAMES, Post, Village, lines, same, weights

import fedstrata
from fedstrata import UserError
from fedstrata.engines.local import LocalEngine
from fedstrata.plan.messages import NoReply, Reply, Request
from fedstrata.runs import stages
from fedstrata.sites import engine as between
from fedstrata.sites import gate, release_log
from fedstrata.sites.engine import Presence
from fedstrata.sites.site import Site
from fedstrata.wire.store import Store
from fedstrata.wire.tensor_file import TensorFile
from tiny import tiny_model, tokenizer

DEADLINE = 600.0
"""Simulated seconds that a site has for its answer; the polls of a schedule alone do not reach it."""
MISSING = re.compile("did not answer in time|is not connected")
"""Reasons for which a reply may be missing, and those of a site that lost its disk."""
FORGOTTEN = re.compile(r".*: (this run is not known here|\w+: version \d was never sent, this client holds 0)")
MOST_POLLS = 5000
"""After which a run on a network that is whole again hangs."""
MOST_SECONDS = 60.0
"""Real seconds between two polls after which it hangs too."""
ROUNDS = 4
STATELESS = ("fedavg", {})
JOBS = (
    STATELESS,
    ("fedavg", {"wire": {"codec": "delta", "bits": 1, "density": 0.05}, "train": {"optimizer_state": "persist"}}),
)
"""The second one's sites keep what they have not sent, and moments, from round to round."""
Past = tuple[tuple[int, bool] | None, ...]
"""What became of what a site keeps: a round that it trained, and whether the server took the reply; None where it
lost its disk."""
DOOMS = ("wait", "send", "receive", "online", "before commit", "after commit")
"""Where a server is killed."""


class Killed(RuntimeError):
    """The server's process is gone."""


@dataclass(frozen=True)
class Packet:
    """A message on its way to a site, or an answer on its way back."""

    id: str
    site: str
    message: bytes
    limit: int


class Net:
    """The transport of a run; what happens in it is decided by the machine, between two polls."""

    def __init__(self, hosts: dict[str, Any]) -> None:
        self.hosts, self.number = hosts, 0
        self.clock, self.wall = 1000.0, timedelta()
        self.to_sites: list[Packet] = []
        self.to_server: list[Packet] = []
        self.arrived: list[tuple[str, bytes | None]] = []
        self.down: set[str] = set()
        self.starts = Counter[str]()
        self.doom: tuple[str, int] | None = None
        self.run_may, self.run_waits = threading.Semaphore(0), threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.clock

    def pass_by(self, place: str) -> None:
        """The server is at this place; it may be its last."""
        if self.doom and self.doom[0] == place:
            self.doom = (place, self.doom[1] - 1)
            if self.doom[1] < 0:
                self.doom = None
                raise Killed

    def online(self) -> dict[str, Presence]:
        self.pass_by("online")
        return {name: (i, str(self.starts[name])) for i, name in enumerate(NAMES) if name not in self.down}

    def send(self, to: Presence, message: TensorFile, seconds: float, answer_bytes: int) -> str:
        self.pass_by("send")
        self.number += 1
        self.to_sites.append(Packet(str(self.number), NAMES[to[0]], bytes(message), answer_bytes))
        return str(self.number)

    def receive(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        self.pass_by("receive")
        while self.arrived:
            yield self.arrived.pop(0)

    def wait(self, seconds: float) -> None:
        self.clock += seconds
        self.run_waits.release()
        self.run_may.acquire()
        self.pass_by("wait")


class ServersRun:
    """A run of the server's program, poll by poll."""

    def __init__(self, net: Net, job: dict[str, Any], resume: bool) -> None:
        self.net, self.result, self.error = net, None, None  # type: ignore[var-annotated]
        self.over = False
        self.thread = threading.Thread(target=self._play, args=(job, resume), daemon=True)
        self.thread.start()
        self._await()

    def _play(self, job: dict[str, Any], resume: bool) -> None:
        try:
            self.result = fedstrata.run(job, resume=resume)
        except BaseException as error:
            self.error = error
        self.over = True
        self.net.run_waits.release()

    def _await(self) -> None:
        assert self.net.run_waits.acquire(timeout=MOST_SECONDS), "the run hangs between two polls"

    def poll(self) -> None:
        """Go on to the next poll, or to the end."""
        self.net.run_may.release()
        self._await()


class Stage:
    """A village on a net, made once and emptied for every schedule; and what its runs come to in one process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.village = Village(folder, monkeypatch)
        self.folder, self.counts = folder, Counter[str]()
        self.jobs = [self._job(name, tables) for name, tables in JOBS]
        self.references: dict[tuple[int, tuple[Past, ...]], Any] = {}
        self.pasts: dict[str, list[tuple[int, bool] | None]] = {}
        self.trained: list[tuple[str, int, float] | tuple[str, None, None]] = []
        self.net = Net({})
        exchange, commit, carry_out = LocalEngine.exchange, stages.state.RunState.commit, Site.carry_out

        def as_sites_did(engine: LocalEngine, requests: Iterable[Request]) -> Iterator[Reply | NoReply]:
            for request in requests:
                left, taken = self.pasts[request.client], None
                while left and (left[0] is None or left[0][0] == request.round):
                    if (event := left.pop(0)) is None:
                        data = engine.data[request.client]
                        fresh = Store(data.store.folder / f"disk-{len(left)}", data.store.note)
                        engine.data = {**engine.data, request.client: replace(data, store=fresh)}
                        continue
                    [reply] = exchange(engine, [request])
                    taken = reply if event[1] else taken
                yield taken or NoReply(request.client, "is left out")

        def carrying_out(site: Site, request: Request, *rest: Any, **more: Any) -> Reply:
            reply = carry_out(site, request, *rest, **more)
            if request.phase == "train":
                self.trained.append((site.name, request.round, reply.seconds))
            return reply

        def committing(*args: Any) -> None:
            self.net.pass_by("before commit")
            commit(*args)
            self.net.pass_by("after commit")

        monkeypatch.setattr(LocalEngine, "exchange", as_sites_did)
        monkeypatch.setattr(Site, "carry_out", carrying_out)
        monkeypatch.setattr(stages.state.RunState, "commit", committing)
        clock = release_log.now
        for module in (release_log, gate):
            monkeypatch.setattr(module, "now", lambda: clock() + self.net.wall)

    def _job(self, name: str, tables: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        model = self.folder / "model"
        if not model.exists():
            tiny_model("bert", layers=1).save_pretrained(model)
            tokenizer().save_pretrained(model)
        config: dict[str, Any] = {
            "model": {"name": str(model)},
            "task": {"kind": "classify"},
            "data": {"train": str(self.village.everything), "test": str(self.village.everything)},
            "clients": {},
            "method": {"name": name, "rounds": ROUNDS},
            "train": {"batch_size": 2, "max_tokens": 32, "precision": "fp32", "device": "cpu"},
        }
        for key, table in tables.items():
            config[key] = {**config.get(key, {}), **table}
        here, there = self.village.jobs(config, deadline=DEADLINE, quorum=0.1)
        return {**here, "engine": {"name": "inprocess", "quorum": 0.1}}, there

    def empty(self) -> Net:
        """Sites and server as at the very beginning, and a new net between them."""
        shutil.rmtree(self.folder / "there", ignore_errors=True)
        for name in NAMES:
            shutil.rmtree(self.home(name), ignore_errors=True)
        self.net, self.trained = Net({}), []
        self.village.post = self.net  # type: ignore[assignment]
        self.village.start()
        self.village.monkeypatch.setattr(between, "time", self.net)
        return self.net

    def home(self, name: str) -> Path:
        """What a site keeps."""
        return self.folder / "federation" / "sites" / name / "state"

    def past(self, name: str, keeps: bool, taken: set[tuple[str, int, float]]) -> Past:
        """What became of what a site keeps, without what nothing follows from."""
        past: list[tuple[int, bool] | None] = []
        for event in self.trained:
            who, round, _ = event
            if who != name:
                continue
            if round is None:
                while past and past[-1] is not None and not past[-1][1]:
                    past.pop()  # trained in vain, and forgotten
                past += [None] * bool(past and past[-1])
            elif past and past[-1] is not None and past[-1][0] == round:
                past[-1] = round, past[-1][1] or event in taken  # the same once more
            else:
                past.append((round, event in taken))
        while past and (past[-1] is None or not past[-1][1]):
            past.pop()
        return tuple(past if keeps else [event for event in past if event and event[1]])

    def reference(self, number: int, pasts: tuple[Past, ...]) -> Any:
        """The run in one process, in which this becomes of what the clients keep."""
        key = number, pasts
        if key not in self.references:
            self.pasts = {name: list(past) for name, past in zip(NAMES, pasts, strict=True)}
            folder = self.folder / f"here-{len(self.references)}"
            self.references[key] = fedstrata.run({**self.jobs[number][0], "output": {"dir": str(folder)}})
            assert not any(self.pasts.values())
        return self.references[key]


class Schedule(RuleBasedStateMachine):
    """One run, and what happens to it."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.net = self.stage.empty()
        self.kind, self.excused, self.run = 0, False, None  # type: ignore[var-annotated]
        self.forgot: set[str] = set()
        self.resumed_without_some = False
        self.owed: set[tuple[str, int]] = set()  # who lost its disk, after which round that the server had taken

    def count(self, what: str, excuse: bool = False) -> None:
        """Count what happens; some of it excuses that a site's reply is missing in a round."""
        self.stage.counts[what] += 1
        self.excused = self.excused or excuse

    @property
    def running(self) -> bool:
        """The server's run is on."""
        return self.run is not None and not self.run.over

    @initialize(kind=some.sampled_from((0, 1, 1)), polls=some.integers(0, 7))
    def begin(self, kind: int, polls: int) -> None:
        """Undisturbed at first, so that what happens then falls into any of the rounds: they take eight polls."""
        self.kind = kind
        self.run = ServersRun(self.net, self.stage.jobs[kind][1], resume=False)
        self._go_on(polls, frozenset(NAMES))

    @invariant()
    def one_message_moves_and_the_server_looks(self) -> None:
        """After whatever happened, so that most of it happens in the middle of a run."""
        if not self.running:
            return
        if self.net.to_server:
            packet = self.net.to_server.pop(0)
            self.net.arrived.append((packet.id, packet.message))
        elif self.net.to_sites:
            self._deliver(self.net.to_sites.pop(0))
        self.run.poll()

    # --- time ---

    @rule(polls=some.integers(1, 4))
    def the_run_goes_on(self, polls: int) -> None:
        if self.running:
            self.count("the run goes on")
            self._go_on(polls, frozenset())

    @precondition(lambda self: self.running)
    @rule(polls=some.integers(1, 4), names=some.frozensets(some.sampled_from(NAMES), min_size=1))
    def the_run_goes_on_with_some_sites(self, polls: int, names: frozenset[str]) -> None:
        self.count("the run goes on with some sites")
        self._go_on(polls, names)

    @precondition(lambda self: self.running)
    @rule(
        polls=some.integers(2, 8), late=some.sampled_from(NAMES), back=some.integers(0, 4), asked=some.booleans()
    )
    def a_site_is_too_late(self, polls: int, late: str, back: int, asked: bool) -> None:
        """The others answer; then it is there again, and what it was asked may come late."""
        self.count("a site is too late", excuse=True)
        self._go_on(polls, frozenset(NAMES) - {late})
        if not asked:
            self.net.to_sites = [packet for packet in self.net.to_sites if packet.site != late]
        self.net.clock += DEADLINE + 1
        self._go_on(1, frozenset())
        self._go_on(back, frozenset(NAMES))

    @precondition(lambda self: self.running)
    @rule(seconds=some.sampled_from((1.0, 6.0, DEADLINE - 1, DEADLINE + 1, 100 * DEADLINE)))
    def the_servers_clock_jumps(self, seconds: float) -> None:
        """As a machine does that was suspended."""
        self.count("the server's clock jumps", excuse=True)
        self.net.clock += seconds

    @precondition(lambda self: self.running)
    @rule(days=some.sampled_from((-10_000, -1, 1, 10_000)))
    def the_calendar_jumps(self, days: int) -> None:
        self.count("the calendar jumps")
        self.net.wall = timedelta(days=days)

    # --- messages ---

    @precondition(lambda self: self.net.to_sites)
    @rule(place=some.integers(0, 9), twice=some.booleans())
    def a_site_answers(self, place: int, twice: bool) -> None:
        packet = self._take(self.net.to_sites, place, twice)
        self.count("a site answers" + " a copy" * twice)
        self._deliver(packet)

    @precondition(lambda self: self.net.to_sites)
    @rule(place=some.integers(0, 9), trained=some.booleans())
    def a_site_dies_over_a_message(self, place: int, trained: bool) -> None:
        self.count("a site dies over a message")
        packet = self._take(self.net.to_sites, place)
        host = self.net.hosts[packet.site]

        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        if not trained:
            host.callback = die
        try:
            if packet.site not in self.net.down:
                self._answer(packet)
        except KeyboardInterrupt:
            pass
        self._start(packet.site)

    @precondition(lambda self: self.net.to_server)
    @rule(place=some.integers(0, 9), twice=some.booleans())
    def an_answer_arrives(self, place: int, twice: bool) -> None:
        packet = self._take(self.net.to_server, place, twice)
        self.count("an answer arrives" + " a first time" * twice)
        self.net.arrived.append((packet.id, packet.message))

    @precondition(lambda self: self.net.to_sites or self.net.to_server)
    @rule(place=some.integers(0, 9))
    def a_message_is_lost_and_the_server_is_told(self, place: int) -> None:
        self.count("a message is lost, which the server is told")
        packet = self._take(self.net.to_sites or self.net.to_server, place)
        self.net.arrived.append((packet.id, None))

    @precondition(lambda self: self.net.to_sites or self.net.to_server)
    @rule(name=some.sampled_from(NAMES))
    def what_is_on_its_way_is_lost(self, name: str) -> None:
        """And nobody is told."""
        for packets in (self.net.to_sites, self.net.to_server):
            for packet in [packet for packet in packets if packet.site == name]:
                self.count("a message is lost without a word", excuse=True)
                packets.remove(packet)

    # --- who is there ---

    @precondition(lambda self: self.running)
    @rule(name=some.sampled_from(NAMES))
    def a_site_starts_again(self, name: str) -> None:
        self.count("a site starts again")
        self._start(name)

    @precondition(lambda self: self.running)
    @rule(name=some.sampled_from(NAMES))
    def a_site_comes_or_goes(self, name: str) -> None:
        self.count("a site comes or goes", excuse=True)
        self.net.down ^= {name}
        self.net.starts[name] += 1

    @precondition(lambda self: self.running)
    @rule(name=some.sampled_from(NAMES))
    def a_site_loses_its_disk(self, name: str) -> None:
        self.count("a site loses its disk", excuse=True)
        self.forgot.add(name)
        if taken := [i for i, client in self._replied() if client == name]:
            self.owed.add((name, max(taken)))
        shutil.rmtree(self.stage.home(name), ignore_errors=True)
        self.stage.trained.append((name, None, None))
        self._start(name)

    @precondition(lambda self: self.running)
    @rule(place=some.sampled_from(DOOMS), later=some.integers(0, 3))
    def the_server_is_killed(self, place: str, later: int) -> None:
        self.count("the server is killed")
        self.net.doom = place, later

    @precondition(lambda self: self.run and self.run.error)
    @rule()
    def the_server_starts_again(self) -> None:
        self.count("the server starts again")
        self._resume()

    def teardown(self) -> None:
        """The network is whole again, and everybody is there: the run comes to its end."""
        if self.run is None:
            return
        self.net.doom, self.net.down = None, set()
        for _ in range(MOST_POLLS):
            if self.run.over and self.run.error is None:
                break
            if self.run.over:
                self._resume()
            else:
                self._go_on(1, frozenset(NAMES))
        else:
            raise AssertionError(f"the run has not ended after {MOST_POLLS} polls")
        self._check()

    def _check(self) -> None:
        """The run ended in the bits of the run in one process with the same participants, or a loss is said."""
        run = self.run.result
        replied = self._replied()
        absent = frozenset({(i, name) for i in range(ROUNDS) for name in NAMES} - replied)
        self.count("runs with everybody in every round" if not absent else "runs without some in some rounds")
        assert self.excused or not absent, f"{sorted(absent)}: nothing that happened excuses that they are missing"
        for line in self._lines("missing"):
            forgotten = line["client"] in self.forgot and FORGOTTEN.fullmatch(line["reason"])
            assert forgotten or MISSING.fullmatch(line["reason"]), line
        stateless = JOBS[self.kind] is STATELESS
        lost = {line["client"] for line in json.loads((run.folder / "result.json").read_text("utf-8"))["lost"]}
        assert lost <= (set() if stateless else self.forgot), "a site has lost nothing, and is said to have"
        # one answer may have been on its way when the disk was lost; the next one tells of the loss
        told = {name for name, last in self.owed for i, client in replied if client == name and i > last + 1}
        assert stateless or told <= lost, "a site has lost what it kept and gone on, and nobody said so"
        if lost:
            self.count("runs in which the server says that a site lost what it kept")
        if not stateless and any({(i - 1, name), (i + 1, name)} <= replied for i, name in absent):
            self.count("runs in which a site that keeps something misses a round between two")
        taken = {(line["client"], line["round"], line["seconds"]) for line in self._replies()}
        pasts = tuple(self.stage.past(name, not stateless, taken) for name in NAMES)
        if any(rounds != sorted(rounds) for rounds in ([event[0] for event in past if event] for past in pasts)):
            self.count("runs in which a site without its disk trains an old copy of a request: the end alone")
            return
        reference = self.stage.reference(self.kind, pasts)
        if not absent and not lost and not self.resumed_without_some:
            same(reference, run)
        elif not absent and not lost:
            assert start_and_replies(reference) == start_and_replies(run)
        first, second = weights(reference), weights(run)
        assert all(torch.equal(first[key], second[key]) for key in first), pasts
        assert reference.score == run.score
        assert run.status == "finished"

    # --- helpers ---

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """What stands in the server's records so far."""
        path = self.stage.folder / "there" / f"{name}.jsonl"
        return lines(path) if path.exists() else []

    def _replies(self) -> list[dict[str, Any]]:
        """The records of the replies that the server has taken so far."""
        return [line for line in self._lines("rounds") if line["client"] in NAMES]

    def _replied(self) -> set[tuple[int, str]]:
        """Round and site of every reply that the server has taken so far."""
        return {(line["round"], line["client"]) for line in self._replies()}

    def _resume(self) -> None:
        self.owed.clear()  # what was not committed is asked for again
        # and who did not reply is sent everything, so more bytes than in a run in one process
        self.resumed_without_some |= bool(self._lines("missing"))
        error = self.run.error
        assert error is None or isinstance(error, Killed | UserError), error
        assert not isinstance(error, UserError) or "engine.quorum" in str(error), error
        self.net.to_server, self.net.arrived = [], []  # nobody waits for them any more
        self.run = ServersRun(self.net, self.stage.jobs[self.kind][1], resume=True)

    def _start(self, name: str) -> None:
        self.stage.village.start(name)
        self.net.starts[name] += 1

    def _take(self, packets: list[Packet], place: int, copy: bool = False) -> Packet:
        place %= len(packets)
        return packets[place] if copy else packets.pop(place)

    def _deliver(self, packet: Packet) -> None:
        if packet.site not in self.net.down:
            self.net.to_server.append(replace(packet, message=self._answer(packet)))

    def _answer(self, packet: Packet) -> bytes:
        host = self.net.hosts[packet.site]
        Post.admit(self.net, host, packet.message)  # type: ignore[arg-type]
        answer = bytes(host.answer(packet.message))
        assert len(answer) - 8 - int.from_bytes(answer[:8], "little") <= packet.limit
        return answer

    def _go_on(self, polls: int, names: frozenset[str]) -> None:
        """So many polls, with everything brought at once to and from these sites, and nothing to others."""
        for _ in range(polls):
            self._flow(names)
            if not self.run.over:
                self.run.poll()

    def _flow(self, names: frozenset[str]) -> None:
        for packet in [packet for packet in self.net.to_sites if packet.site in names]:
            self.net.to_sites.remove(packet)
            self._deliver(packet)
        for packet in [packet for packet in self.net.to_server if packet.site in names]:
            self.net.to_server.remove(packet)
            self.net.arrived.append((packet.id, packet.message))


def start_and_replies(run: Any) -> list[tuple[str, ...]]:
    """The lines of a run's ledger but for what sites were sent in its rounds."""
    ledger = lines(run.folder / "ledger.jsonl")
    return sorted(
        tuple(map(str, line.values())) for line in ledger if "up" in line.values() or "setup" in line.values()
    )


def play(
    folder: Path, runs: int, steps: int, monkeypatch: pytest.MonkeyPatch, number: int | None = None
) -> Counter[str]:
    """Play so many schedules of at most so many steps; returns what happened how often.

    They are always the same ones, or others for each ``number``.

    Raises:
        AssertionError: a run hung, ended in other bits, or with an error; Hypothesis prints the shortest schedule.
    """
    stage = Stage(folder, monkeypatch)
    machine: Callable[[], Schedule] = type("Drawn", (Schedule,), {"stage": stage})
    if number is not None:
        machine = seed(number)(machine)
    drawn = settings(
        max_examples=runs,
        stateful_step_count=steps,
        deadline=None,
        derandomize=number is None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=drawn)
    return stage.counts


def main() -> None:
    """Play schedules and print what happened how often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, help="other schedules for each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        counts = play(Path(folder), options.runs, options.steps, monkeypatch, options.seed)
    print("| what happened | times |\n|---|---:|")
    for what, count in sorted(counts.items()):
        print(f"| {what} | {count:,} |")


if __name__ == "__main__":
    main()
