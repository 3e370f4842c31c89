"""What noise and sums do not go with."""

from __future__ import annotations

from fedstrata.errors import UserError
from fedstrata.job.sum_rules import check_sum_only
from fedstrata.job.tables import Job, method_name
from fedstrata.job.task_kinds import TASK_KINDS

PAYLOADS = {
    "hidden_states": "hidden states of its texts leave a client as they are, with the labels",
    "activations": "hidden states of every batch, and their gradients, leave a client as they are",
}
"""Payload -> why noise over gradients or changes promises nothing about it."""


def check_privacy(job: Job) -> None:
    """Refuse a promise that the rest of the job would break.

    Raises:
        UserError: it would.
    """
    table = job.privacy
    check_sum_only(job)
    if table.level == "none":
        return
    _check_payload(job)
    _check_beside(job)
    if table.level == "example":
        _check_examples(job)
    else:
        _check_messages(job)


def check_task(job: Job, own: object) -> None:
    """Refuse a task of the caller's own where every example's gradient is clipped.

    Raises:
        UserError: its loss may let one example's gradient depend on others.
    """
    if own is not None and job.privacy.level == "example":
        raise UserError(
            "[privacy] level: 'example' goes with the tasks of [task] kind, whose loss is a mean over predictions "
            "that each belong to one example; with a task of one's own this is not known"
        )


def _check_payload(job: Job) -> None:
    """Noise promises something about parts of the model alone."""
    if why := PAYLOADS.get(job.method.exchange):
        raise UserError(
            f"[privacy] level: {job.privacy.level!r} promises nothing with {method_name(job.method)!r} as set "
            f"here, as {why}; expected a method that sends weights, or level = 'none'"
        )


def _check_beside(job: Job) -> None:
    """Beside the parts of the model nothing may leave that no noise covers."""
    level = job.privacy.level
    if job.clients.test is not None:
        raise UserError(
            "[clients] test: clients would tell their scores on rows of their own, which no noise covers; with "
            f"[privacy] level = {level!r} expected [data] test, with rows that the server has"
        )
    if TASK_KINDS[job.task.kind].classes and job.task.labels is None:
        raise UserError(
            "[task] labels: is missing; read from the clients' rows, the names of the classes would tell of them. "
            f"With level = {level!r} expected a list of names"
        )
    if job.model is not None and job.model.config is not None and job.model.tokenizer is None:
        raise UserError(
            "[model] tokenizer: is missing; one that is trained on the clients' rows tells of their words. With "
            f"level = {level!r} expected a folder or hub id"
        )


def _check_examples(job: Job) -> None:
    """Every example takes part in every step by a coin of its own, and its gradient is clipped by itself."""
    train = job.train
    for key, default, why in (
        ("tokens_per_batch", None, "examples are drawn one by one, whatever their lengths"),
        ("gradient_accumulation", 1, "batch_size is the expected number of examples of a whole step"),
        ("max_grad_norm", None, "[privacy] clip shortens the gradient of every single example"),
        ("cache_frozen_layers", False, "examples are drawn anew for every step, not once in an epoch"),
    ):
        if getattr(train, key) != default:
            raise UserError(f"[train] {key}: does not go with [privacy] level = 'example': {why}")
    if job.data.long_text == "pack":
        raise UserError(
            "[data] long_text: 'pack' does not go with [privacy] level = 'example': with one text more or less "
            "all blocks after it begin elsewhere, so that every one of them is another example; expected: 'chunk' "
            "or 'truncate'"
        )


def _check_messages(job: Job) -> None:
    """The change of each message is clipped and noised."""
    if not (job.privacy.sum_only or job.privacy.single_message):
        raise UserError(
            "[privacy] level: 'client' without sum_only leaves the server every single message, so that each "
            "needs noise enough for itself, and the score suffers; single_message = true says that this is meant "
            "and that epsilon is that of the single message"
        )
