"""The JSON fields of a request: one table, by which requests are checked and OpenAPI is written."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seq2engine.errors import RequestError

MOST_TEXTS = 256  # texts of one request at most


class BadRequestError(RequestError):
    """A body that is not a request: not JSON, or of another type."""


@dataclass(frozen=True)
class Field:
    kind: str  # of JSON schema: integer, number, boolean, string
    about: str
    least: float | None = None
    search: bool = True  # a field of SearchOptions by the same name

    @property
    def schema(self) -> dict[str, Any]:
        bound = {} if self.least is None else {"minimum": self.least}
        return {"type": self.kind, "description": self.about, **bound}


FIELDS = {
    "beam": Field("integer", "Beams; 1 is greedy.", 1),
    "nbest": Field("integer", "Outputs of a text, best first.", 1),
    "max_length": Field("integer", "Most output tokens.", 1),
    "min_length": Field("integer", "Fewest output tokens.", 0),
    "length_penalty": Field("number", "Power of the length that a beam's score is divided by."),
    "no_repeat_ngram": Field("integer", "No n-gram of this length occurs twice; 0 allows all.", 0),
    "repetition_penalty": Field("number", "Above 1, tokens that are already in the output are less likely."),
    "sample": Field("boolean", "Draw tokens instead of taking the likeliest."),
    "temperature": Field("number", "Of sampling."),
    "top_k": Field("integer", "Sample from this many likeliest tokens; 0: from all.", 0),
    "top_p": Field("number", "Sample from the fewest tokens whose probabilities add up to this."),
    "seed": Field("integer", "The same seed draws the same tokens.", 0),
    "source_language": Field("string", "As the model names it; most models have none.", search=False),
    "target_language": Field("string", "As the model names it; most models have none.", search=False),
    "scores": Field("boolean", "Answer with scores and the tokens' log-probabilities.", search=False),
    "tokens": Field("boolean", "Answer with token ids.", search=False),
    "truncate": Field("boolean", "Cut a text that is too long instead of returning an error.", search=False),
    "stream": Field("boolean", "Answer with server-sent events, pieces of text as they are decoded.", search=False),
    "timeout": Field("number", "Timeout in seconds, at most the server's.", search=False),
}
TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "string": str,
}


@dataclass(frozen=True)
class ParsedRequest:
    """A request's texts, its search options, and its other fields."""

    texts: tuple[str, ...]
    search: Mapping[str, Any]
    others: Mapping[str, Any]


def object_from_json(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadRequestError(f'the body is {named(values)}, expected an object such as {{"text": "..."}}')
    return values


def request_from_json(body: bytes) -> ParsedRequest:
    """Checks all fields; every problem is in one message."""
    values = object_from_json(body)
    given = values.pop("text", None)
    texts = [given] if isinstance(given, str) else given
    problems = []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        problems.append("text: expected a string or a list of strings")
    elif not 1 <= len(texts) <= MOST_TEXTS:
        problems.append(f"text: {len(texts)} texts, expected 1 to {MOST_TEXTS}")
    elif any(has_lone_surrogate(text) for text in texts):
        problems.append("text: half of a surrogate pair, expected characters")
    problems += [problem for name, value in values.items() if (problem := problem_with(name, value))]
    if problems:
        raise RequestError("; ".join(problems))
    assert isinstance(texts, list)
    given_values = {name: value for name, value in values.items() if value is not None}
    search = {name: value for name, value in given_values.items() if FIELDS[name].search}
    others = {name: value for name, value in given_values.items() if not FIELDS[name].search}
    return ParsedRequest(tuple(texts), search, others)


def has_lone_surrogate(text: str) -> bool:
    """Whether the text has a lone surrogate, which no tokenizer takes."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def problem_with(name: str, value: object) -> str:
    if name not in FIELDS:
        near = difflib.get_close_matches(name, [*FIELDS, "text"], 1)
        return f"unknown field {name!r}" + (f"; did you mean {near[0]}?" if near else "")
    field = FIELDS[name]
    if value is None:
        return ""
    numeric = field.kind in ("integer", "number")
    if not isinstance(value, TYPES[field.kind]) or (numeric and isinstance(value, bool)):
        return f"{name}: {named(value)}, expected {'an' if field.kind == 'integer' else 'a'} {field.kind}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name}: {value}, expected a finite number"
    if field.least is not None and isinstance(value, int | float) and value < field.least:
        return f"{name}: {value}, expected at least {field.least:g}"
    return ""


def named(value: object) -> str:
    """The JSON type of a value, and the value itself if that is short."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
