"""How columns of texts, labels and clients are usually called."""

from __future__ import annotations


def plain_name(name: str) -> str:
    """A column's name as the usual ones below are written."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


LABELS = (
    "label",
    "labels",
    "gold_label",
    "class",
    "classes",
    "category",
    "target",
    "sentiment",
    "gold",
    "intent",
    "topic",
    "polarity",
    "rating",
    "stars",
    "score",
    "similarity",
    "ner_tags",
    "ner",
    "tags",
    "tag",
    "labels_ner",
    "y",
)
"""How columns of labels are called, the surest first."""
TEXTS = (
    "text",
    "sentence",
    "content",
    "body",
    "review",
    "comment",
    "tweet",
    "utterance",
    "document",
    "abstract",
    "description",
    "question",
    "message",
    "note",
    "report",
    "title",
    "tokens",
    "words",
)
PAIRS = (
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("query", "passage"),
    ("question", "answer"),
    ("question", "context"),
)
"""Names of two columns that belong together; so do two that differ only in a last 1 and 2, or a and b."""
CLIENTS = (
    "client",
    "client_id",
    "hospital",
    "clinic",
    "site",
    "institution",
    "bank",
    "publisher",
    "center",
    "centre",
    "lab",
    "laboratory",
    "organization",
    "organisation",
    "owner",
    "company",
    "branch",
    "department",
    "source",
    "user",
    "author",
    "speaker",
)
