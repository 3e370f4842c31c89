"""A program for a process of its own: loads models' folders with transformers alone and scores them row by row.

    python score_folders.py CASES.json SCORES.json

Each case has the ``folder``, the Hugging Face ``auto`` class, the ``kind`` of task, its ``labels`` and ``rows``,
and for a folder with code of its own ``trust``. For ``mlm``, ``rows`` names a file with masked batches.
Writes the mean losses and, of classes, the shares of right answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)


def texts(case: dict[str, Any], model: Any, tokenizer: Any) -> list[tuple[torch.Tensor, Any]]:
    """For ``classify``, ``pair`` and ``regress``: each row's logits and its answer."""
    found = []
    for *words, answer in case["rows"]:
        logits = model(**tokenizer(*words, return_tensors="pt")).logits
        wanted = [float(answer)] if case["kind"] == "regress" else [case["labels"].index(answer)]
        found.append((logits[:, 0] if case["kind"] == "regress" else logits, wanted))
    return found


def tags(case: dict[str, Any], model: Any, tokenizer: Any) -> list[tuple[torch.Tensor, Any]]:
    """The logits of the first token of every word, and the words' tags."""
    found = []
    for words, answers in case["rows"]:
        inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        of_word = inputs.word_ids()
        first = [of_word.index(number) for number in range(len(words))]
        found.append((model(**inputs).logits[0, first], [case["labels"].index(answer) for answer in answers]))
    return found


def next_tokens(case: dict[str, Any], model: Any, tokenizer: Any) -> list[tuple[torch.Tensor, Any]]:
    """The logits of every token but the first of a text, and the tokens."""
    found = []
    for [text] in case["rows"]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        found.append((model(input_ids=ids).logits[0, :-1], ids[0, 1:].tolist()))
    return found


def masked(case: dict[str, Any], model: Any, tokenizer: Any) -> list[tuple[torch.Tensor, Any]]:
    """The logits at the masked positions, and the tokens that stood there."""
    batches = torch.load(case["rows"])
    return [(model(**inputs).logits[positions], targets.tolist()) for inputs, targets, positions in batches]


KINDS = {"tag": tags, "clm": next_tokens, "mlm": masked}


def score(case: dict[str, Any]) -> dict[str, float]:
    trust = {"trust_remote_code": True} if case.get("trust") else {}
    model = getattr(transformers, case["auto"]).from_pretrained(case["folder"], **trust).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(case["folder"], **trust)
    with torch.inference_mode():
        found = KINDS.get(case["kind"], texts)(case, model, tokenizer)
    guesses, answers = (
        torch.cat([logits for logits, _ in found]),
        torch.tensor([a for _, each in found for a in each]),
    )
    if case["kind"] == "regress":
        return {"loss": float(functional.mse_loss(guesses, answers))}
    right = (guesses.argmax(-1) == answers).float().mean()
    return {"loss": float(functional.cross_entropy(guesses, answers)), "accuracy": float(right)}


def refusal(case: dict[str, Any]) -> str:
    """What transformers says of a folder with code that nobody has trusted."""
    try:
        getattr(transformers, case["auto"]).from_pretrained(case["folder"])
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    plain = [case for case in cases if not case.get("trust")]
    scores = {case["name"]: score(case) for case in plain}
    refusals = {case["name"]: refusal(case) for case in cases if case.get("trust")}
    assert not any(name.startswith("fedstrata") for name in sys.modules), "plain folders need transformers alone"
    scores |= {case["name"]: score(case) for case in cases if case.get("trust")}
    Path(sys.argv[2]).write_text(json.dumps({"scores": scores, "refusals": refusals}), "utf-8")
