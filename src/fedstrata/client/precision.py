"""``train.precision = "auto"``: bf16 or fp32, by a fixed rule on shapes and the processor.

Nothing is timed when a job runs: the same job on the same kind of machine takes the same path. The rule comes from
the grid of ``benchmarks/precision.py`` in docs/results/client_step.md.
"""

from __future__ import annotations

import torch

from fedstrata.job.tables import Job

TYPICAL_TOKENS = 64
"""Tokens taken for a text where batches are padded to their longest one; their lengths are not known yet."""
FEATURES = ("amx_bf16", "avx512_bf16", "bf16")
"""Names that torch has for a processor that multiplies bf16 matrices itself; the last is ARM's."""
LEAST_STATES = 512 * 128
"""Tokens in a batch times the model's width, for bf16: with AMX it won from 384 x 128 on. Texts are often shorter
than is reckoned here."""
LEAST_WIDTH = 128
"""Width of a model for bf16: at 64 measurements disagree."""


def batch_tokens(job: Job) -> int:
    """Tokens in one of a job's batches, as far as they are known before its texts are read."""
    if job.train.tokens_per_batch is not None:
        return job.train.tokens_per_batch
    whole = job.train.padding == "max" or job.data.long_text == "pack"
    return job.train.batch_size * min(job.train.max_tokens, job.train.max_tokens if whole else TYPICAL_TOKENS)


def multiplies_bf16(device: str) -> bool:
    """Whether the processor, or the GPU, multiplies bf16 matrices itself."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in FEATURES)


def resolve_precision(precision: str, device: str, width: int | None = None, tokens: int | None = None) -> str:
    """For ``auto``: ``bf16`` where it is quicker, else ``fp32``.

    Args:
        precision: the job's.
        device: ``cpu`` or ``cuda``.
        width: H, the model's; None for one that is large enough.
        tokens: in a batch; None for a batch that is large enough.
    """
    if precision != "auto":
        return precision
    wide = width is None or width >= LEAST_WIDTH
    large = wide and (width is None or tokens is None or tokens * width >= LEAST_STATES)
    return "bf16" if multiplies_bf16(device) and (large or device == "cuda") else "fp32"
