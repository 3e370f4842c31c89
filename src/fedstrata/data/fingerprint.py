"""Fingerprints: whether a run goes on with the rows it began with, and whether stages have the same texts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstrata.data.prepare import Prepared
from fedstrata.data.read import Rows
from fedstrata.data.rows import text_columns
from fedstrata.job.tables import Job
from fedstrata.plan.kinds import Index

Fingerprints = dict[str, dict[str, list[Any]]]
"""``train`` and ``test`` -> whose rows ("" for the test rows of all) -> [number of rows, their fingerprint]."""


def fingerprints(data: Prepared) -> Fingerprints:
    """The fingerprints of each client's rows and of the test rows: of every value that was read, in order."""
    tests = {"": np.arange(len(data.test))} if data.tests is None else data.tests
    return {"train": _each(data.train, data.shards), "test": _each(data.test, tests)}


def difference(before: Mapping[str, Any], now: Fingerprints) -> str | None:
    """Whose rows differ, as a sentence; rather those that differ in number. None if none do."""
    found = []
    for kind, own in now.items():
        for name in dict.fromkeys([*before[kind], *own]):
            old, new = (rows.get(name, [0, ""]) for rows in (before[kind], own))
            noun = "test rows" if kind == "test" else "rows"
            if list(old) != new:
                found.append(
                    (old[0] == new[0], f"the {noun} of {name}" if name else f"the {noun}", old[0], new[0])
                )
    if not found:
        return None
    same, whose, old, new = min(found, key=lambda each: each[0])
    counts = f"{old} of them, as before" if same else f"there were {old}, now {new}"
    return f"{whose} are not those it began with ({counts})"


def text_digests(job: Job, data: Prepared) -> dict[str, Index]:
    """Client -> a digest of every text in its rows, ``[n]``; each text of a pair is one."""
    columns = [data.train.columns[name] for name in text_columns(job)]

    def digest(text: str) -> int:
        found = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(found, "big", signed=True)

    return {
        client: np.asarray([digest(values[i]) for values in columns for i in rows.tolist()], np.int64)
        for client, rows in data.shards.items()
    }


def _each(rows: Rows, shards: Mapping[str, Index]) -> dict[str, list[Any]]:
    return {name: [len(own), _fingerprint(rows, own)] for name, own in shards.items()}


def _fingerprint(rows: Rows, index: Index) -> str:
    digest = hashlib.blake2b(digest_size=16)
    places = index.tolist()
    for values in (*rows.columns.values(), rows.pools):
        texts = [values[i].encode(errors="surrogatepass") for i in places] if values else []
        digest.update(np.asarray([len(texts), *map(len, texts)], np.int64).tobytes())  # where each of them ends
        digest.update(b"".join(texts))
    return digest.hexdigest()
