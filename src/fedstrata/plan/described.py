"""What a class says of its fields: type, default, and the docstring under each, for lists of options."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel


@dataclass(frozen=True)
class Described:
    """A field of a table or method.

    Attributes:
        name: its name.
        kind: its type in words, such as ``whole number`` or ``"a" | "b"``.
        default: as a job file writes it; empty where there is none.
        text: the docstring under it, on one line; may be empty.
    """

    name: str
    kind: str
    default: str
    text: str


def described(table: type[BaseModel]) -> Iterator[Described]:
    """The fields of a table of the job file or of a method, in their order."""
    texts = field_texts(table)
    for name, field in table.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "" if field.is_required() or default is None else toml_value(default)
        yield Described(name, type_words(field.annotation), shown, texts.get(name, ""))


def field_texts(table: type[BaseModel]) -> dict[str, str]:
    """Field -> the docstring under it, of the class itself or of the nearest one it inherits from."""
    texts: dict[str, str] = {}
    for kind in reversed(table.__mro__):
        if kind in (BaseModel, object) or not issubclass(kind, BaseModel):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for line, under in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                texts.setdefault(line.target.id, "")
                if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
                    texts[line.target.id] = " ".join(str(under.value.value).replace("``", "`").split())
    return texts


def type_words(annotation: Any) -> str:
    """A type as a reader of a job file knows it."""
    words = {int: "whole number", float: "number", str: "string", bool: "true | false", Path: "path"}
    if annotation in words:
        return words[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return type_words(annotation.__value__)
    if origin is Literal:
        return " | ".join(toml_value(value) for value in inner)
    if origin is typing.Annotated:
        return type_words(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_words(one) for one in inner if one is not type(None)))
    if origin is list:
        return f"list of {type_words(inner[0])}"
    if origin is dict or annotation is dict:
        return "table"
    return "table" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else "value"


def toml_value(value: Any) -> str:
    """A default as a job file writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
