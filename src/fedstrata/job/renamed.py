"""Renamed keys and values of job files: an old one is refused with a sentence that names the new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADS = {"ordinary": "cls", "average": "mean"}

KEYS: Mapping[tuple[str, str], str] = {
    ("clients", "split"): "partition",
    ("data", "overlong"): "long_text",
    ("train", "optimiser"): "optimizer_state",
    ("train", "batching"): "group_by_length",
    ("train", "decay"): "lr_decay",
    ("train", "schedule"): "lr_schedule",
    ("train", "power"): "lr_power",
    ("train", "warmup"): "warmup_ratio",
    ("train", "features_gb"): "feature_cache_gb",
    ("train", "keep_features"): "keep_feature_cache",
    ("server", "rule"): "optimizer",
    ("client", "allow"): "may_send",
    ("allow", "exchanges"): "payloads",
}
"""(table, old key) -> new key; ``allow`` is a table of ``site.toml``."""
VALUES: Mapping[tuple[str, str], Mapping[Any, Any]] = {
    ("clients", "partition"): {
        "skewed": "quantity_skew",
        "sorted": "label_sorted",
        "table": "label_table",
    },
    ("data", "long_text"): {"split": "chunk"},
    ("train", "optimizer_state"): {"fresh": "reset", "kept": "persist"},
    ("train", "group_by_length"): {"length": True, "random": False},
    ("head", "kind"): HEADS,
    ("method", "head"): HEADS,
    ("method", "name"): {"centralised": "centralized"},
    ("method", "variant"): {"centralised": "centralized"},
    ("server", "optimizer"): {
        "fedavg": "sgd",
        "fedavgm": "momentum",
        "fedadam": "adam",
        "fedyogi": "yogi",
        "fedadagrad": "adagrad",
    },
    ("client", "may_send"): {"features": "hidden_states"},
    ("allow", "payloads"): {"features": "hidden_states"},
}
"""(table, new key) -> old value -> new value."""
ELSEWHERE: Mapping[str, str] = {
    "lr": "learning_rate",
    "bs": "batch_size",
    "wd": "weight_decay",
    "mu": "proximal_mu",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "max_length": "max_tokens",
    "max_seq_length": "max_tokens",
    "lr_scheduler": "lr_schedule",
    "warmup": "warmup_ratio",
    "num_rounds": "rounds",
    "num_clients": "count",
    "n_clients": "count",
    "path": "name",
    "output_dir": "dir",
    "folder": "dir",
}
"""What other programs call a key -> what it is called here, in whichever table."""


def renamed(table: str, key: str, value: Any) -> str | None:
    """What an old key or an old value is called now, as the tail of a sentence; None if it is neither.

    Args:
        table: name of the table, such as ``clients``.
        key: the key that was found.
        value: its value; in a list the first old entry counts.
    """
    now = KEYS.get((table, key))
    values = VALUES.get((table, now or key), {})
    entries = value if isinstance(value, list) else [value]
    old = next((entry for entry in entries if isinstance(entry, str) and entry in values), None)
    about_value = "" if old is None else f"{old!r} is now {_toml(values[old])}"
    if now is None:
        return about_value or None
    return f"is now called {now}" + (f", and {about_value}" if about_value else "")


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
