"""Cost of a run between sites compared with the same run in one process: seconds, bytes, memory.

    python benchmarks/sites.py --json sites.json

A federation of two sites on this machine, over loopback, with TLS and keys. Every process computes with one
thread, also that of a run in one process. Models have random weights, texts consist of made-up words.

Rounds: a masked language model of BERT-base's size, few steps on short texts, so that the overhead shows. A
round lasts from the last reply of the round before to its own last reply; the first is reported separately.
Network bytes are counted by a relay between the sites and the server. Cold start: what a new process for every
message would cost, estimated from its parts. Split steps: FedBERT, in one process and between processes in
turn, repeatedly; a ratio is the median of the ratios within a turn.

Only Linux, because memory is read from /proc. Needs the extra 'flower'.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import measure
from rich.console import Console
from rich.table import Table

# What computes is imported by the processes that do: this one only starts them, counts and waits.

SIZES = {
    "large": (24, 1024, 16),
    "base": (12, 768, 12),
    "mini": (12, 384, 12),
    "small": (12, 256, 4),
    "tiny": (2, 32, 2),
}
"""Layers, width, heads: BERT's (1.5 GB with a large vocabulary, 0.44 GB), MiniLM's (0.13 GB), RoBERTa's of the
FedBERT paper, and a tiny model to test this file with."""
VOCABULARY = {"large": 70_000, "base": 30_522, "mini": 30_522, "small": 50_265, "tiny": 30_522}
DTYPES = ("bf16", "fp32")
"""Wire types of split steps."""
SITES = ("a", "b")
TOKENS = {name: f"token of {name}" for name in SITES}
ALONE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "no_proxy": "127.0.0.1",
    "no_grpc_proxy": "127.0.0.1",
}
"""The environment of every process: one thread, no model hub."""
ANNOUNCED = "FEDSTRATA_ANNOUNCED_PORT"
"""Environment of a run: the port of the relay through which its sites come for messages."""
LONG = 120.0
"""Seconds for a process to start."""
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
PROCESSES = multiprocessing.get_context("forkserver")
"""Of those that are no commands; what they need is imported once."""
PROCESSES.set_forkserver_preload(["transformers", "fedstrata.sites.stream", "fedstrata.client.setup"])
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 119)


# ---- processes, and what they take


def parents() -> dict[int, int]:
    """Process -> its parent, for all processes."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [child for child, parent in parents().items() if parent == pid]


def words_of(pid: int) -> list[bytes]:
    """The command by which a process was started; nothing of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def memory(pid: int, what: str = "VmHWM") -> int:
    """Memory in bytes: the peak so far, or with ``VmRSS`` the current value; 0 for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) * 1024
    return 0


def processor(pid: int) -> float:
    """Seconds of processor time so far."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


class Peaks:
    """Watches the peak memory of processes by name until each has ended."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.pids = pids
        self.seen: Counter[str] = Counter()
        self.stop = threading.Event()
        for pid in pids.values():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew at what is held now
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def end(self) -> dict[str, int]:
        """Bytes by name."""
        self.stop.set()
        self.thread.join()
        return dict(self.seen)

    def _watch(self) -> None:
        while True:
            for name, pid in self.pids.items():
                self.seen[name] = max(self.seen[name], memory(pid))
            if self.stop.wait(0.1):
                return


@contextmanager
def started(command: Sequence[str], log: Path, read: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process for the duration of the context; it and its children are ended afterwards.

    Args:
        command: the command to start.
        log: the file for its output; with ``read`` for its errors alone.
        read: its output is read through a pipe.
    """
    with log.open("w") as out:
        given = subprocess.PIPE if read else out
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=given, stderr=out, text=True)
    below: set[int] = set()
    try:
        yield process
    finally:
        below.update(children(process.pid))
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        if process.poll() is None:
            process.kill()
            process.wait()
        gone = time.monotonic() + 20
        while (left := below & parents().keys()) and time.monotonic() < gone:
            time.sleep(0.05)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def await_word(word: str, process: subprocess.Popen[str], log: Path) -> None:
    """Wait until a process reports that it is ready."""
    began = time.monotonic()
    while word not in log.read_text():
        if process.poll() is not None or time.monotonic() - began > LONG:
            raise SystemExit(f"waited in vain for {word!r}:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


class Relay:
    """Forwards connections from its own port to another, and adds the bytes in both directions to ``counted``."""

    def __init__(self, port: int, counted: Counter[str]) -> None:
        self.to = port
        self.bytes = counted
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.to))
                except OSError:
                    near.close()
                    continue
                self._count("connections", 1)
                for way, source, target in (("up", near, far), ("down", far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass, args=(way, source, target), daemon=True).start()

    def _pass(self, way: str, source: socket.socket, target: socket.socket) -> None:
        buffer = memoryview(bytearray(2**18))
        with suppress(OSError):
            while count := source.recv_into(buffer):
                target.sendall(buffer[:count])
                self._count(way, count)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _count(self, what: str, count: int) -> None:
        with self.lock:
            self.bytes[what] += count

    def total(self) -> int:
        """Bytes in both directions."""
        return self.bytes["up"] + self.bytes["down"]


# ---- rounds


def make_model(size: str, folder: Path) -> None:
    """A BERT with random weights and a tokenizer of made-up words, whose ids do not fill the vocabulary."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        texts(0, 500), trainers.WordPieceTrainer(vocab_size=1000, special_tokens=list(names.values()))
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    words = {f"{kind}_token": name for kind, name in names.items()}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **words).save_pretrained(
        folder
    )
    layers, width, heads = SIZES[size]
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY[size],
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def texts(seed: int, count: int) -> list[str]:
    """Texts of a dozen made-up words."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=12)) for _ in range(count)]


def make_job(folder: Path, method: str, rounds: int) -> Path:
    """A job over the model in ``folder``, and its rows: each site's, and all together."""
    rows = [(text, name) for seed, name in enumerate(SITES) for text in texts(seed, 32)]
    files = {"all": rows, "test": rows[:8], **{site: [row for row in rows if row[1] == site] for site in SITES}}
    for name, own in files.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "site"), *own])
    job = folder / f"{method}.toml"
    job.write_text(
        f"""
[model]
name = "{folder / "model"}"
[task]
kind = "mlm"
[data]
train = "{folder / "all.csv"}"
test = "{folder / "test.csv"}"
[clients]
partition = "column"
column = "site"
[method]
name = "{method}"
rounds = {rounds}
[train]
steps = 2
batch_size = 4
max_tokens = 32
device = "cpu"
[server]
evaluate = "end"
[output]
dir = "{folder / "out"}"
""",
        "utf-8",
    )
    return job


def free_ports(count: int) -> list[int]:
    """Unused ports."""
    with ExitStack() as stack:
        tried = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in tried]


@contextmanager
def federation(folder: Path) -> Iterator[tuple[Path, Relay, dict[str, int]]]:
    """A federation whose sites are connected: its folder, the relay, its processes by name."""
    from fedstrata.sites.provision import init

    command = [sys.executable, "-c", "from fedstrata.cli import main; main()"]
    made = folder / "federation"
    port, stream, message = free_ports(3)
    init(made, SITES, port=port, stream_port=stream, message_port=message)
    with ExitStack() as stack:
        server = stack.enter_context(started([*command, "serve", str(made)], folder / "serve.log"))
        await_word("serving at", server, folder / "serve.log")
        counted: Counter[str] = Counter()
        relay, messages = (stack.enter_context(Relay(where, counted)) for where in (port, message))
        os.environ[ANNOUNCED] = str(messages.port)
        processes = {"serve": server.pid}
        joined = []
        for name in SITES:
            settings = made / "sites" / name / "site.toml"
            text = settings.read_text("utf-8")
            for old, new in (
                (f"127.0.0.1:{port}", f"127.0.0.1:{relay.port}"),
                ('"train.csv"', f'"{folder / name}.csv"'),
                ('"auto"', '"cpu"'),
                ("# threads = 4", "threads = 1"),
                ("min_examples = 8", "min_examples = 4"),  # of eight short texts one may have no masked token
            ):
                if old not in text:
                    raise SystemExit(f"site.toml has no {old!r}")
                text = text.replace(old, new)
            settings.write_text(text, "utf-8")
            joined.append(stack.enter_context(started([*command, "join", str(settings)], folder / f"{name}.log")))
        for name, process in zip(SITES, joined, strict=True):
            await_word(f"{name}: connected", process, folder / f"{name}.log")
            processes[f"join {name}"] = process.pid
        for name, pid in list(processes.items()):
            [child] = (child for child in children(pid) if b"--superlink" in words_of(child) or name == "serve")
            processes[name.replace("serve", "SuperLink").replace("join", "SuperNode")] = child
        yield made, relay, processes


def run_job(job: str, *words: str) -> None:
    """The process of a run: the job, and a line for every reply, timed by the clock that all processes share."""
    import fedstrata
    from fedstrata.events import Replied

    if "engine.name=flower" in words:
        from fedstrata.sites.message_server import MessageServer

        listens = MessageServer.__init__

        def announces(server: Any, *arguments: Any) -> None:
            listens(server, *arguments)
            server.port = int(os.environ[ANNOUNCED])  # the sites come through the relay

        MessageServer.__init__ = announces  # type: ignore[method-assign]

    def tell(event: Any) -> None:
        if isinstance(event, Replied):
            print(json.dumps([event.round, event.client, time.monotonic()]), flush=True)

    fedstrata.run(job, words, progress=tell)


def run(job: Path, words: Sequence[str], pids: dict[str, int], count: Callable[[], int]) -> dict[str, Any]:
    """One run: the time of each round's last reply, the value of ``count`` then, peak memory, the records."""
    log, began = job.with_suffix(".log"), time.monotonic()
    before = {name: memory(pid, "VmRSS") for name, pid in pids.items()}
    ends: list[float] = []
    counted = [count()]
    command = [sys.executable, __file__, "run", str(job), *words]
    with started(command, log, read=True) as process:
        assert process.stdout
        peaks = Peaks({"run": process.pid, **pids})
        first: dict[str, int] = {}
        for line in process.stdout:
            _, client, when = json.loads(line)
            if client == SITES[-1]:
                ends.append(when)
                counted.append(count())
                if len(ends) == 1:
                    first = peaks.end()
                    peaks = Peaks({"run": process.pid, **pids})
        if process.wait():
            raise SystemExit(f"the run failed:\n{log.read_text()[-2000:]}")
        later = peaks.end()
    out = job.parent / "out"
    records = {
        name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("rounds", "ledger", "transport")
        if (out / f"{name}.jsonl").exists()
    }
    weights = (out / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(out)
    return {
        "began": began,
        "ends": ends,
        "counted": counted,
        "before": before,
        "first_peak": first,
        "later_peak": later,
        "model": hashlib.sha256(weights).hexdigest(),
        **records,
    }


def told(made: dict[str, Any], at_once: bool) -> dict[str, Any]:
    """Seconds and bytes per round of a run, medians over all rounds but the first.

    Args:
        made: what :func:`run` returned.
        at_once: the clients train in parallel, so that the slowest counts and not their sum.
    """
    rounds = range(1, len(made["ends"]))
    figures: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    for number in rounds:
        work = [r["seconds"] for r in made["rounds"] if r["round"] == number and r["client"] in SITES]
        whole = made["ends"][number] - made["ends"][number - 1]
        trained = max(work) if at_once else sum(work)
        add("round", whole)
        add("work", trained)
        add("beyond", whole - trained)
        add("payload", sum(r["bytes"] for r in made["ledger"] if r["round"] == number and r["phase"] == "train"))
        if "transport" in made:
            sent = [r for r in made["transport"] if r["round"] == number]
            add("asked", max(r["seconds"] for r in sent if r["direction"] == "up"))
            add("messages", sum(r["bytes"] for r in sent))
            add("wire", made["counted"][number + 1] - made["counted"][number])
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in figures.items()}
    first = [r["seconds"] or 0 for r in made.get("transport", ()) if r["round"] == 0]
    return {
        **medians,
        "rounds": {name: [round(value, 3) for value in values] for name, values in figures.items()},
        "until_first": made["ends"][0] - made["began"],
        "first_asked": max(first, default=0.0),
        **{name: made[name] for name in ("before", "first_peak", "later_peak", "model")},
    }


def measure_rounds(size: str, methods: Sequence[str], rounds: int, idle: float, folder: Path) -> dict[str, Any]:
    """Runs between sites and in one process, method by method; and the cost of an idle federation."""
    process = PROCESSES.Process(target=make_model, args=(size, folder / "model"))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("the model could not be made")
    made: dict[str, Any] = {"methods": {}}
    for method in methods:
        job = make_job(folder, method, rounds)
        near = told(run(job, (), {}, lambda: 0), at_once=False)
        with federation(folder) as (home, relay, pids):
            if "idle" not in made:
                made["idle"] = at_rest(relay, pids, idle)
            words = (f"engine.federation={home}", "engine.name=flower")
            far = told(run(job, words, pids, relay.total), at_once=True)
        shutil.rmtree(home)
        made["methods"][method] = {"sites": far, "inprocess": near}
    return made


def at_rest(relay: Relay, pids: dict[str, int], seconds: float) -> dict[str, Any]:
    """Cost of idle connected sites: bytes per second of each, and processor time."""
    time.sleep(1)
    began, bytes_, used = time.monotonic(), relay.total(), {name: processor(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    passed = time.monotonic() - began
    return {
        "bytes": (relay.total() - bytes_) / passed / len(SITES),
        "processor": {name: (processor(pid) - used[name]) / passed for name, pid in pids.items()},
    }


def show_rounds(made: dict[str, Any], size: str, rounds: int) -> None:
    """Print the tables of the rounds."""
    title = f"a round, {size}: medians of {rounds - 1}, seconds"
    heads = ("method", "engine", "round", "asked to last reply", "own work", "beyond it", "first round's end")
    times = Table(*heads, title=title)
    heads = ("method", "payload, MB", "messages, MB", "wire, MB", "messages, + %", "wire, + %")
    sizes = Table(*heads, title="bytes of a round, both directions, both sites")
    for method, engines in made["methods"].items():
        for engine, told in engines.items():
            asked = f"{told['asked']:.2f}" if "asked" in told else "-"
            own = ("round", "work", "beyond", "until_first")
            whole, work, beyond, first = (f"{told[name]:.2f}" for name in own)
            times.add_row(method, engine, whole, asked, work, beyond, first)
        far = engines["sites"]
        payload, messages, wire = (far[name] for name in ("payload", "messages", "wire"))
        over = [f"{100 * (each / payload - 1):.3f}" for each in (messages, wire)]
        sizes.add_row(method, *(f"{each / 1e6:.3f}" for each in (payload, messages, wire)), *over)
    CONSOLE.print(times)
    CONSOLE.print("own work: between sites the longer of the two, who work at once; in one process their sum")
    same = all(each["sites"]["model"] == each["inprocess"]["model"] for each in made["methods"].values())
    CONSOLE.print(f"final weights are {'the same, bit for bit' if same else 'NOT the same'}")
    CONSOLE.print(sizes)
    peaks = Table("method", "process", "before", "start, first round", "later rounds", title="peak memory, MB")
    for method, engines in made["methods"].items():
        for engine, told in engines.items():
            for name in told["later_peak"]:
                each = [told[when].get(name, 0) for when in ("before", "first_peak", "later_peak")]
                label = f"{name}, {engine}" if name == "run" else name
                peaks.add_row(method, label, *(f"{value / 1e6:.0f}" if value else "-" for value in each))
    CONSOLE.print(peaks)
    idle = made["idle"]
    used = ", ".join(f"{name} {100 * share:.1f}" for name, share in idle["processor"].items())
    CONSOLE.print(f"with no run: {idle['bytes'] / 1e3:.1f} kB/s for each site; % of a core: {used}")


# ---- a process for every message, by its parts


LOADS = """
import sys, torch, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1])
rows = open(sys.argv[2], encoding="utf-8").read().splitlines()
transformers.AutoTokenizer.from_pretrained(sys.argv[1])(rows)
"""
STARTS = "import sys; sys.argv = ['flwr-clientapp', '--help']; " + (
    "from flwr.supernode.cli.flwr_clientapp import flwr_clientapp; flwr_clientapp()"
)


def measure_cold(folder: Path, repeat: int) -> dict[str, float]:
    """Seconds: to load model and rows in a new process, and for Flower's own process to come up."""
    commands = {
        "load": [sys.executable, "-c", LOADS, str(folder / "model"), str(folder / f"{SITES[0]}.csv")],
        "flower": [sys.executable, "-c", STARTS],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeat):
        for name, command in commands.items():
            began = time.monotonic()
            subprocess.run(command, check=True, capture_output=True)
            taken[name].append(time.monotonic() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


# ---- split steps


class Party:
    """What both ends of split learning have: a model, its parts, a plan, texts of equal length."""

    def __init__(self, size: str, batch: int, tokens: int, steps: int) -> None:
        import numpy as np
        import torch
        import transformers

        from fedstrata.client.answer import ClientRuntime
        from fedstrata.client.precision import resolve_precision
        from fedstrata.client.scorer import FeatureCaches, Scorer
        from fedstrata.client.trainer import Trainer
        from fedstrata.client.working_model import WorkingModel
        from fedstrata.data.tokens import Tokens
        from fedstrata.job.tables import Train
        from fedstrata.methods import METHODS
        from fedstrata.models.parts import find_parts
        from fedstrata.plan.streams import Streams
        from fedstrata.tasks import Examples
        from fedstrata.tasks.mlm import MaskedLM
        from fedstrata.wire.activations import stream_form
        from fedstrata.wire.codec import Wire, make_codec

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the benchmark to end this process
        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers, width, heads = SIZES[size]
        vocabulary, count = VOCABULARY[size], batch * steps
        config = transformers.BertConfig(
            vocab_size=vocabulary,
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        ids = np.random.default_rng(0).integers(10, vocabulary, 2 * count * tokens).astype(np.int32)
        self.examples = Examples(Tokens(ids, np.arange(2 * count + 1) * tokens, np.arange(2 * count)))
        self.shards = {name: np.arange(count) + i * count for i, name in enumerate(SITES)}
        task = MaskedLM(mask=4, padding=0, special=np.asarray([0, 1, 2]), vocabulary=vocabulary)
        model = transformers.BertForMaskedLM(config)
        self.parts = find_parts(model)
        precision = resolve_precision("auto", "cpu")
        train = Train(device="cpu", batch_size=batch, learning_rate=1e-6, precision=precision)
        working, streams = WorkingModel(model, self.parts), Streams(0)
        self.runtimes = {
            dtype: ClientRuntime(
                working=working,
                trainer=Trainer(working, task, train, streams),
                scorer=Scorer(working, task, train, streams),
                caches=FeatureCaches(working, task, train, lambda done, total: None),
                wire=Wire(make_codec(dtype)),
                dtype=dtype,
                stream=stream_form((dtype, 1.0), (dtype, 1.0)),
            )
            for dtype in DTYPES
        }
        self.working = working
        method = METHODS["fedbert"](rounds=1)
        self.plan = method.plan(self.parts, "mlm", 0, SITES[0], streams)

    def weights(self, names: Sequence[str]) -> dict[str, Any]:
        """A copy of parts of the model."""
        from fedstrata.models.parts import part_tensors

        return {
            part: {n: t.clone() for n, t in part_tensors(self.working.model, self.parts, [part]).items()}
            for part in names
        }


def pace(times: Sequence[float]) -> float:
    """Seconds per step, from the times at which steps ended."""
    return (times[-1] - times[0]) / (len(times) - 1)


def be_server(pipe: Any, folder: Path, tls: tuple[bytes, bytes], sizes: tuple[str, int, int, int]) -> None:
    """The process with the layers; asked to, it also plays clients itself."""
    from fedstrata.client.answer import ClientData
    from fedstrata.engines.local import LocalEngine
    from fedstrata.events import Stepped
    from fedstrata.exchanges import EXCHANGES
    from fedstrata.server.layers import LayerSettings, ServerLayers
    from fedstrata.server.server import Server
    from fedstrata.sites.activation_server import ActivationServer
    from fedstrata.wire.store import Store

    party = Party(*sizes)
    plan, weights = party.plan, party.weights(party.parts.names)
    own = {part: (0, tensors) for part, tensors in weights.items() if part not in plan.server}
    times: dict[str, list[float]] = {}

    def tell(event: Any) -> None:
        if isinstance(event, Stepped):
            times.setdefault(event.client, []).append(time.monotonic())

    def layers_of(dtype: str) -> ServerLayers:
        runtime = party.runtimes[dtype]
        server = Server(party.parts, dict(weights), runtime.wire)
        settings = LayerSettings(plan.server, False, 512, runtime.stream, Store(folder / "layers" / dtype))
        return ServerLayers(runtime.working, server, settings, runtime.trainer.train, runtime.trainer.streams)

    with ExitStack() as stack:
        held = {dtype: layers_of(dtype) for dtype in DTYPES}
        doors = {
            dtype: stack.enter_context(ActivationServer(layers, "127.0.0.1:0", tls, LONG))
            for dtype, layers in held.items()
        }
        pipe.send({dtype: door.port for dtype, door in doors.items()})
        while (asked := pipe.recv()) is not None:
            where, dtype, names = asked
            layers = held[dtype]
            layers.begin(0)
            requests = [layers.server.request(0, name, plan) for name in names]
            if where == "between":
                doors[dtype].expect(requests, TOKENS)
                pipe.send(requests)
                pipe.recv()
            else:
                times.clear()
                engine = LocalEngine(
                    runtimes=[party.runtimes[dtype]],
                    handlers=EXCHANGES["activations"].handlers,
                    data={
                        name: ClientData(
                            party.examples, party.shards[name], party.examples, {}, Store(folder / "near" / name)
                        )
                        for name in names
                    },
                    shared=dict(own),
                    connect=layers.connect,
                    interleaved=True,
                    tell=tell,
                )
                list(engine.exchange(requests))
            traffic = sum(sum(layers.collect(name)[1].values()) for name in names)
            layers.end(0)
            pipe.send((dict(times), traffic / len(names) / sizes[-1]))


def be_site(
    pipe: Any, name: str, folder: Path, ca: bytes, ports: dict[str, int], sizes: tuple[str, int, int, int]
) -> None:
    """The process of a site."""
    from fedstrata.client.answer import ClientData, Work, answer_request
    from fedstrata.client.trainer import drain
    from fedstrata.exchanges import EXCHANGES
    from fedstrata.sites.activation_client import ActivationClient
    from fedstrata.wire.store import Store

    party = Party(*sizes)
    names = [part for part in party.parts.names if part not in party.plan.server]
    own = {part: (0, tensors) for part, tensors in party.weights(names).items()}
    data = ClientData(party.examples, party.shards[name], party.examples, {}, Store(folder / name))
    times: list[float] = []

    def tell(step: int, steps: int, loss: float, seen: int) -> None:
        times.append(time.monotonic())

    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        dtype, request = asked
        times.clear()
        with ActivationClient(f"127.0.0.1:{ports[dtype]}", request, TOKENS[name], ca, LONG) as link:
            drain(
                answer_request(
                    Work(party.runtimes[dtype], request, own, data, tell, link), EXCHANGES["activations"].handlers
                )
            )
        pipe.send(times)


def measure_split(
    size: str, batch: int, tokens: int, steps: int, repeat: int, folder: Path
) -> list[dict[str, Any]]:
    """Steps in one process and between processes in turn: one client, and two that share the server layers."""
    from fedstrata.sites.provision import init

    init(folder / "keys", SITES)
    tls = folder / "keys" / "tls"
    ca, certificate, key = ((tls / name).read_bytes() for name in ("ca.pem", "server.pem", "server.key"))
    sizes = (size, batch, tokens, steps)
    taken: dict[tuple[str, int], dict[str, list[float]]] = {}
    bytes_: dict[str, float] = {}
    with ExitStack() as stack:

        def start(be: Callable[..., None], *words: Any) -> Any:
            here, there = PROCESSES.Pipe()
            process = PROCESSES.Process(target=be, args=(there, *words, sizes), daemon=True)
            process.start()
            there.close()
            stack.callback(stop, process, here)
            return here

        def stop(process: Any, pipe: Any) -> None:
            with suppress(OSError):
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

        server = start(be_server, folder, (certificate, key))
        ports = server.recv()
        sites = {name: start(be_site, name, folder, ca, ports) for name in SITES}
        for pipe in sites.values():
            pipe.recv()

        def go(where: str, dtype: str, names: Sequence[str]) -> float:
            server.send((where, dtype, names))
            times: dict[str, list[float]] = {}
            if where == "between":
                for request in server.recv():
                    sites[request.client].send((dtype, request))
                times = {name: sites[name].recv() for name in names}
                server.send("done")
            near, bytes_[dtype] = server.recv()
            return statistics.fmean(pace(each) for each in (times or near).values()) / len(names)

        for where in ("near", "between"):  # to warm up
            go(where, "bf16", SITES)
        for _ in range(repeat):
            for dtype in DTYPES:
                for count in range(1, len(SITES) + 1):
                    for where in ("near", "between"):
                        seconds = go(where, dtype, SITES[:count])
                        taken.setdefault((dtype, count), {}).setdefault(where, []).append(seconds)
    return [
        {
            "model": size,
            "wire": dtype,
            "sites": count,
            "near": statistics.median(ways["near"]),
            "between": statistics.median(ways["between"]),
            "ratio": statistics.median(b / a for a, b in zip(ways["near"], ways["between"], strict=True)),
            "bytes": bytes_[dtype],
            "turns": ways,
        }
        for (dtype, count), ways in taken.items()
    ]


def show_split(steps: Sequence[dict[str, Any]], batch: int, tokens: int, repeat: int) -> None:
    """Print the table of split steps."""
    heads = ("model", "wire", "sites", "MB of a batch", "in process, s", "between, s", "ratio", "least and most")
    table = Table(*heads, title=f"a batch of {batch} texts of {tokens} tokens, {repeat} turns")
    for each in steps:
        near, between = each["turns"]["near"], each["turns"]["between"]
        ratios = sorted(b / a for a, b in zip(near, between, strict=True))
        numbers = [f"{each['bytes'] / 1e6:.2f}", *(f"{each[way]:.3f}" for way in ("near", "between", "ratio"))]
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        table.add_row(each["model"], each["wire"], str(each["sites"]), *numbers, spread)
    CONSOLE.print(table)


def load() -> str:
    """Of the machine, as a clause."""
    return "load " + " ".join(f"{each:.1f}" for each in os.getloadavg())


def main() -> None:
    """Measure, print tables, write the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the figures here")
    options.add_argument("--quick", action="store_true", help="a tiny model, in about a minute")
    options.add_argument("--only", choices=("rounds", "split"), help="one half of it")
    options.add_argument("--rounds", type=int, help="rounds of a job")
    options.add_argument("--repeat", type=int, help="repetitions of split steps and cold starts")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--tokens", type=int, default=128)
    chosen = options.parse_args()
    quick = chosen.quick
    rounds, repeat = chosen.rounds or (3 if quick else 5), chosen.repeat or (1 if quick else 3)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("stopped"))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    machine = f"{found[0] if found else 'processor'}, {os.cpu_count()} cores"
    CONSOLE.print(f"{machine}; one thread to compute with in each process; loopback, TLS; {load()}")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        stack.callback(forkserver._forkserver._stop)  # and wait for it, which its end with this process would not
        os.environ.update(ALONE, FEDSTRATA_CACHE=str(Path(made) / "cache"))
        if chosen.only != "split":
            size, methods = ("tiny", ["fedavg"]) if quick else ("base", ["fedbfpt", "fedavg"])
            figures["rounds"] = measure_rounds(size, methods, rounds, 1 if quick else 20, Path(made))
            show_rounds(figures["rounds"], size, rounds)
            figures["cold"] = cold = measure_cold(Path(made), repeat)
            CONSOLE.print(
                f"a process for every message, estimated by its parts: {cold['load']:.2f} s to load torch, model "
                f"and rows, {cold['flower']:.2f} s for Flower's own to come up; {load()}"
            )
        if chosen.only != "rounds":
            figures["split"] = []
            for size, steps in (("tiny", 4),) if quick else (("small", 5), ("base", 3)):
                with tempfile.TemporaryDirectory(dir=made) as own:
                    figures["split"] += measure_split(size, chosen.batch, chosen.tokens, steps, repeat, Path(own))
            show_split(figures["split"], chosen.batch, chosen.tokens, repeat)
            CONSOLE.print(load())
    if chosen.json:
        figures["machine"] = measure.machine()
        chosen.json.write_text(json.dumps(figures, indent=1), "utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run_job(*sys.argv[2:])
    else:
        main()
