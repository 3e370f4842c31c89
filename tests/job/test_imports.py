"""What is slow to load is loaded when it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "sklearn", "scipy", "seqeval", "matplotlib")


@pytest.mark.parametrize(
    "module",
    ["fedstrata.job.file", "fedstrata.job.task_kinds", "fedstrata.data.prepare", "fedstrata.data.batching"],
)
def test_a_job_and_its_rows_are_read_without_torch(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
