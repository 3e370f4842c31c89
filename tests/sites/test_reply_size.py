"""What a site counts before it works is what then leaves, but for headers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_in_memory import Village

import fedstrata
from fedstrata.plan.messages import Request
from fedstrata.sites import gate
from fedstrata.sites.release_log import read_log
from fedstrata.sites.reply_size import least_bytes
from fedstrata.sites.site import Site

Jobs = Callable[..., dict[str, Any]]
HEADERS = 8000
"""Bytes of a message's, of so few tensors."""

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "weights", {"wire": {"dtype": "int8"}}),
    ("fedavg", "weights", {"privacy": {"sum_only": True}}),
    ("fedbert", "activations", {}),
    ("fedfreezebert", "hidden_states", {"head": {"kind": "cls"}, "method": {"variant": "centralized"}}),
]


@pytest.mark.parametrize(("method", "payload", "tables"), CASES)
def test_it_is_counted_before_it_is_computed(
    job: Jobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    payload: str,
    tables: dict[str, dict[str, Any]],
) -> None:
    village = Village(tmp_path, monkeypatch)
    client = {"may_send": ["weights", payload]}
    _, there = village.jobs(job(method, "classify", 2, client=client, server={"evaluate": "end"}, **tables))
    for name in village.names:
        village.site(name, 'payloads = ["weights"]', f'payloads = ["weights", "{payload}"]')
        village.site(name, "# bytes_per_day =", "bytes_per_day =")
    counted: dict[tuple[str, int], int] = {}

    def count(site: Site, request: Request) -> int:
        size = least_bytes(site, request)
        key = site.name, request.round
        counted[key] = max(size, counted.get(key, 0))
        return size

    monkeypatch.setattr(gate, "least_bytes", count)
    fedstrata.run(there)
    left: defaultdict[tuple[str, int], int] = defaultdict(int)
    for name in village.names:
        for release, _ in read_log(village.post.hosts[name].settings.folder):
            if release.payload in ("weights", "hidden_states", "activations"):
                left[name, release.round] += release.bytes
    assert left
    for key, size in left.items():
        assert size - HEADERS < counted[key] <= size, key
