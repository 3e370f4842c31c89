"""Public text: where thresholds and probes are learned, so that no client's text is needed for that."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedstrata.client.setup import Ready
from fedstrata.data.forms import extension
from fedstrata.data.prepare import Prepared
from fedstrata.data.read import WORD_END, Rows
from fedstrata.data.rows import read_rows, text_columns
from fedstrata.errors import UserError, naming, plural
from fedstrata.job.tables import Job
from fedstrata.job.task_kinds import TASK_KINDS
from fedstrata.plan.kinds import Index
from fedstrata.plan.streams import Streams
from fedstrata.tasks import Examples
from fedstrata.tasks.examples import examples

PYTHON = "the Python documentation that comes with this Python"
MOST = 3000
"""Texts that are used, the first ones."""
LEAST = 20
NAME = "public text"
"""Under which random streams are drawn."""


def public_texts(job: Job, source: str | None, base_dir: Path | None) -> tuple[list[str], str]:
    """Public texts, and what they are.

    Args:
        job: the stage's job.
        source: a file or ``demo:`` name with a text column as in the job's ``[data]``, or a txt file; None for
            text that every Python has: its own documentation.
        base_dir: folder in which relative paths are looked up after the working directory.

    Raises:
        UserError: it cannot be read, or has too few texts.
    """
    if source is None:
        return _python_documentation(), PYTHON
    plain = extension(Path(source)) == ".txt"
    column = "text" if plain else text_columns(job)[0]
    data = job.data.model_copy(update={"text": column, "columns": None, "limit": None})
    reading = job.model_copy(update={"data": data, "task": job.task.model_copy(update={"kind": "mlm"})})
    with naming("--public"):
        rows = read_rows(reading, source, [column], base_dir)
    texts = rows.columns[column][:MOST]
    if len(texts) < LEAST:
        raise UserError(f"--public: {source} has {plural(len(texts), 'text')}; expected {LEAST} or more")
    return texts, source


def _python_documentation() -> list[str]:
    """Paragraphs of the help topics of Python."""
    try:
        from pydoc_data import topics
    except ImportError:
        raise UserError(
            "audit: this Python comes without its help topics, the default public text; --public names another"
        ) from None
    texts = []
    for topic in sorted(topics.topics):
        for paragraph in re.split(r"\n\s*\n", topics.topics[topic]):
            words = " ".join(re.sub(r"[*`|+=_-]{2,}", " ", paragraph).split())
            if len(words) > 60:
                texts.append(words)
    rng = np.random.default_rng(0)
    return [texts[i] for i in rng.permutation(len(texts))[:MOST]]


def public_examples(job: Job, data: Prepared, ready: Ready, texts: list[str]) -> Examples:
    """The texts as examples of the job's task; what needs labels gets drawn ones, as a server could draw them."""
    kind, rng = TASK_KINDS[job.task.kind], Streams(job.train.seed).numpy(0, NAME, "public")
    columns = text_columns(job)
    made = {column: texts[place :: len(columns)] for place, column in enumerate(columns)}
    shortest = min(map(len, made.values()))
    made = {column: values[:shortest] for column, values in made.items()}
    if kind.words:
        words = [text.split() for text in made[columns[0]]]
        made[columns[0]] = [WORD_END.join(own) for own in words]
        lengths = [len(own) for own in words]
    else:
        lengths = [1] * shortest
    if data.labels is not None:
        shares = rng.dirichlet(np.full(len(data.labels), 0.5))
        drawn = [rng.choice(len(data.labels), n, p=shares) for n in lengths]
        made[job.data.label] = [WORD_END.join(data.labels[i] for i in own) for own in drawn]
    elif kind.target == "number":
        made[job.data.label] = [repr(float(v)) for v in rng.random(shortest)]
    return examples(job, Rows(made, 0), data.labels, ready.loaded.tokenizer, [np.arange(shortest)])


def check_known(job: Job, public: Examples, special: Index, what: str) -> None:
    """Refuse public text of which the tokenizer knows next to nothing: no threshold could be learned there.

    Args:
        job: the stage's job.
        public: the texts as examples of its task.
        special: token ids that tell nothing, that of unknown words among them.
        what: the texts, for people.

    Raises:
        UserError: fewer than :data:`LEAST` texts have a token that is known; in a pair both texts count.
    """
    tokens = public.tokens
    known = sum(not np.isin(tokens[i], special).all() for i in range(len(public))) * len(text_columns(job))
    if known < LEAST:
        has = f"{plural(known, 'text')} with a token" if known else "no token"
        raise UserError(
            f"--public: {what} has {has} that the model's tokenizer knows; expected {LEAST} texts or more with "
            "one, as thresholds come from them"
        )
