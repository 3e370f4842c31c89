"""Between sites as it is: processes of their own, Flower, TLS, keys, and a stream for hidden states."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedstrata
from deployment import RUN, Deployment
from fedstrata.cli import app
from fedstrata.sites import flower_processes
from fedstrata.sites.control_secret import HEADER, sign
from fedstrata.sites.provision import init
from tiny import SENTENCES

ModelFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    running = Deployment(tmp_path_factory.mktemp("deployment"), ("a", "b"))
    for name in running.names:
        running.set(name, 'payloads = ["weights"]', 'payloads = ["weights", "activations"]')
    running.up(page=True)
    yield running
    running.down()


def job(deployment: Deployment, model: Path, name: str, kind: str, **tables: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": {"name": str(model)},
        "task": {"kind": kind},
        "data": {"train": str(deployment.everything), "test": str(deployment.everything)},
        "clients": {"partition": "column", "column": "site"},
        "method": {"name": name, "rounds": 2},
        "train": {"batch_size": 2, "max_tokens": 32, "precision": "fp32", "device": "cpu"},
    }
    for table, values in tables.items():
        config[table] = {**config.get(table, {}), **values}
    if "test" in config["clients"]:
        del config["data"]["test"]
        config["task"]["labels"] = sorted({label for _, label in SENTENCES})
    return config


def same(here: Path, there: Path) -> None:
    saved = "model" if (here / "model").exists() else "shared"  # where each site has a model of its own
    one, other = (load_file(run / saved / "model.safetensors") for run in (here, there))
    assert all(torch.equal(one[key], other[key]) for key in one)
    ledgers = [sorted((run / "ledger.jsonl").read_text("utf-8").splitlines()) for run in (here, there)]
    assert ledgers[0] == ledgers[1]
    results = [json.loads((run / "result.json").read_text("utf-8")) for run in (here, there)]
    assert results[0]["score"] == results[1]["score"]
    assert results[0]["bytes"] == results[1]["bytes"]


def over_flower(
    deployment: Deployment, model: Path, name: str, kind: str, tables: dict[str, Any], *words: str
) -> None:
    """A run between the sites ends in the same bits as one in process."""
    in_both_places(deployment, job(deployment, model, name, kind, **tables), f"{name}-{kind}", *words)


def in_both_places(deployment: Deployment, config: dict[str, Any], name: str, *words: str) -> None:
    """Run a job between the sites, and in process meanwhile; compare them, stage by stage."""
    process = deployment.run(config, f"there-{name}", *words)
    here = fedstrata.run(config, {"output.dir": str(deployment.folder / f"here-{name}")}).folder
    there = deployment.finished(process, f"there-{name}")
    stages = [f"stages/{stage['name']}" for stage in config.get("stages", [])] or ["."]
    for stage in stages:
        same(here / stage, there / stage)
    output = deployment.out(f"there-{name}")
    for site in deployment.names:
        assert output.count(f"round 2/2  {site}  loss") == len(stages)
    assert "score" in output
    assert not list(there.rglob("missing.jsonl"))


def test_over_flower_a_run_ends_in_the_same_bits(deployment: Deployment, model_folder: ModelFolder) -> None:
    """Weights, then activations through layers that the server holds."""
    config = job(deployment, model_folder(), "fedbt", "classify")
    shared = {"name": "fedbert", "mode": "share", "rounds": 2}
    config["stages"] = [
        {"name": "weights", "task": config.pop("task"), "method": config.pop("method"), "wire": {"dtype": "bf16"}},
        {"name": "activations", "task": {"kind": "mlm"}, "method": shared},
    ]
    in_both_places(deployment, config, "stages")
    done = CliRunner().invoke(app, ["federation", "status", str(deployment.home), "--json"])
    status = json.loads(done.stdout)
    assert all(time.time() > site["since"] > time.time() - 600 for site in status["sites"].values())
    assert (status["server"]["running"], status["run"]["status"], status["run"]["round"]) == (True, "finished", 2)
    [url] = re.findall(r"^page (http://127.0.0.1:\d+/\w+/), on this", deployment.out("serve"), re.MULTILINE)
    page = httpx.get(url).text
    assert "stage activations, fedbert, finished" in page
    assert page.count("since ") == 2


def test_a_supernode_that_gives_up_ends_so_that_it_is_started_again() -> None:
    """After a broken handshake it returns, and a thread of its own would keep the process for good."""
    gives_up = (
        "import os, threading, time, flwr.supernode.cli as cli; "
        "cli.flower_supernode = lambda: threading.Thread(target=time.sleep, args=(600,)).start(); "
        "from fedstrata.sites.flower_processes import _main; _main(str(os.getppid()), 'supernode')"
    )
    assert subprocess.run([sys.executable, "-c", gives_up], timeout=120).returncode == 1


def test_strangers_are_refused(deployment: Deployment, tmp_path: Path) -> None:
    address = f"127.0.0.1:{deployment.port}"
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://{address}/v1/fleet/activate-node")
    deployment.kill("a")
    deployment.join("a", "--insecure")
    foreign = tmp_path / "foreign"
    theirs, ours = foreign / "tls" / "ca.pem", deployment.home / "tls" / "ca.pem"
    strangers = {
        "stranger": (ours, "its key is not registered there"),
        "suspicious": (theirs, "the server's certificate is not signed by this site's ca"),
    }
    init(foreign, list(strangers), port=deployment.port)
    for name, (ca, _) in strangers.items():
        site = foreign / "sites" / name
        (site / "train.csv").write_text("text,label\nA kidney.,kidney\n")
        (site / "ca.pem").write_bytes(ca.read_bytes())
        deployment.spawn(name, "join", str(site / "site.toml"))
    for name, (_, complaint) in strangers.items():
        deployment.until(lambda n=name, c=complaint: c in deployment.out(n), 120, f"{name} is not refused")
        assert f"{name}: connected" not in deployment.out(name)
        deployment.kill(name)
    log = deployment.site("a") / "state" / "logs" / "supernode.log"
    deployment.until(lambda: "Connection attempt failed" in log.read_text("utf-8"), 60, "no refusal of a")
    assert "SuperNode ID" not in log.read_text("utf-8"), "plain text is not understood"


@pytest.mark.parametrize("secret", [None, b"0" * 64])
def test_another_user_of_the_servers_machine_cannot_list_register_or_remove_sites(
    deployment: Deployment, secret: bytes | None
) -> None:
    """Its CA's certificate is no secret; the server's user has the secret alone."""
    from flwr.proto import control_pb2

    from fedstrata.sites.control_client import control_client

    address, ca = f"127.0.0.1:{deployment.port}", (deployment.home / "tls" / "ca.pem").read_bytes()
    trusted = ssl.create_default_context(cadata=ca.decode("ascii"))
    for call in ("list-nodes", "register-node", "unregister-node", "start-run", "list-runs", "stop-run"):
        path = f"/v1/control/{call}"
        headers = {HEADER: sign(secret, path, b"")} if secret else {}
        answer = httpx.post(f"https://{address}{path}", verify=trusted, headers=headers)
        assert (answer.status_code, answer.text) == (
            403,
            "only with the secret of the user that runs fedstrata serve",
        )
    with control_client(address, ca, (deployment.home / "secret").read_bytes()) as control:
        nodes = control.ListNodes(control_pb2.ListNodesRequest()).nodes_info
    assert len(nodes) >= len(deployment.names)


def test_no_text_and_no_path_of_a_site_is_in_a_file_of_the_server(deployment: Deployment) -> None:
    """After the runs above; the messages themselves are read in test_in_memory."""
    written = [*deployment.home.glob("logs/*"), *deployment.folder.glob("there-*/**/*.jsonl")]
    assert len(written) > 4
    found = b"".join(path.read_bytes() for path in written)
    assert str(deployment.home / "sites").encode() not in found
    assert not any(text.encode() in found for text, _ in SENTENCES)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of what Flower builds its app with
def test_without_a_server_the_run_says_so(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lonely = Deployment(tmp_path)
    lonely.write_job(job(lonely, model_folder(), "fedavg", "mlm"))
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, [*RUN.split()[1:], "output.dir=lonely"])
    assert ended.exit_code == 2
    assert ended.output.splitlines()[-1].startswith(
        f"fedstrata: federation: the server at 127.0.0.1:{lonely.port} does not answer"
    )
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    ("client", "server", "path", "passes"),
    [
        ("203.0.113.7", "198.51.100.1", "/v1/fleet/pull-messages", True),
        ("203.0.113.7", "198.51.100.1", "/v1/control/start-run", False),
        ("203.0.113.7", "198.51.100.1", "/v1/runtime/acquire-task", False),
        ("203.0.113.7", "198.51.100.1", "/docs", False),
        ("203.0.113.7", "198.51.100.1", "/v1/fleet/../control/start-run", False),
        ("127.0.0.1", "127.0.0.1", "/v1/fleet/pull-messages", True),
        ("127.0.0.1", "127.0.0.1", "/v1/runtime/acquire-task", True),
        ("198.51.100.1", "198.51.100.1", "/v1/runtime/acquire-task", True),
        ("127.0.0.1", "127.0.0.1", "/v1/control/start-run", False),
        ("127.0.0.1", "127.0.0.1", "/v1/runtime/../control/start-run", False),
        ("127.0.0.1", "127.0.0.1", "/openapi.json", False),
        ("127.0.0.1", "127.0.0.1", "/v1/responses", False),
    ],
)
def test_without_the_secret_only_what_flower_protects_is_reached(
    client: str, server: str, path: str, passes: bool
) -> None:
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "path": path, "client": (client, 1), "server": (server, 9440), "headers": []}
    asyncio.run(flower_processes.ControlGate(app, b"secret")(scope, receive, send))
    assert bool(reached) == passes
    assert passes or sent[0]["status"] == 403


def test_a_stranger_who_wants_a_websocket_is_refused() -> None:
    """It was an error of the program's, whose traceback of 1,800 bytes stood in the log for a call of 150."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/fleet/x", "client": ("203.0.113.7", 1), "headers": []}
    asyncio.run(flower_processes.ControlGate(None, b"secret")(scope, None, send))
    assert sent == [{"type": "websocket.close"}]


@pytest.mark.parametrize(
    "prepare",
    ["import fedstrata.sites.flower", "import fedstrata.sites.flower_processes as p; p.prepare_flower()"],
)
def test_nothing_phones_home(prepare: str) -> None:
    code = f"{prepare}\nfrom flwr.supercore import telemetry\nprint(telemetry.FLWR_TELEMETRY_ENABLED)"
    environment = {key: value for key, value in os.environ.items() if key not in flower_processes.QUIET}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert process.stdout == "0\n", process.stderr


def test_flowers_own_processes_import_nothing_of_flower_before_it_is_told_to_be_quiet() -> None:
    code = "import sys, fedstrata.sites.flower_processes; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"flwr", "torch", "grpc"} & set(process.stdout.split())


def test_without_the_extra_it_says_what_is_needed() -> None:
    code = (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'flwr' else find(name, *rest)\n"
        "import fedstrata.sites.flower\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserError: engine flower: needs the extra 'flower'" in process.stderr
