"""Mutations of parsed JSON that know its structure: other types, sizes and texts, missing and extra names, nesting."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

INTEGERS = (0, -1, 1, 2, 7, 255, 2**31, 2**31 - 1, -(2**31), 10**6, 10**8, 10**9, 10**12, 2**62, 2**63, 10**30)
FLOATS = (0.5, -1.5, 1e-300, 1e300, -0.0, 1e-5)
TEXTS = ("", "x", "x" * 5000, "a\0b", "\ud800", "../../x", "/etc/passwd", "\u202e\u0301😀", "NaN", "%s%n{0}", "é" * 300)
KEYS = ("x", "", "model_type", "__class__", "config", "format", "a\0b")
OTHERS = (None, True, False, [], {}, [1], ["q"], [[]], [[1, "x"]], [None], {"x": 1}, [1.5], [-1], [10**9])
TOKENS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"-" + b"9" * 5000, b'"\\ud800"', b'"\\u0000"')


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a value, its own among them."""
    found = [path]
    if isinstance(value, dict):
        for key, each in value.items():
            found += places_of(each, (*path, key))
    elif isinstance(value, list):
        for place, each in enumerate(value[:50]):
            found += places_of(each, (*path, place))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def other_value(rng: Random, old: Any) -> Any:
    """A value instead of the old one: often of its type, and often not."""
    kind = rng.random()
    if isinstance(old, bool) or old is None:
        pool: tuple[Any, ...] = (not old, *INTEGERS[:4], *OTHERS)
    elif isinstance(old, int) and kind < 0.6:
        pool = (*INTEGERS, old + 1, old - 1, -old, old * 2, old // 2)
    elif isinstance(old, float) and kind < 0.5:
        pool = (*FLOATS, -old, old * 1e9)
    elif isinstance(old, str) and kind < 0.6:
        pool = (*TEXTS, old[:-1], old + old, old.upper())
    elif isinstance(old, list) and kind < 0.5:
        pool = (old[:-1], old + old, old[:1], old[::-1], [*old, "x"], [*old, None], [*old, -1], [*old, 10**9])
    else:
        pool = (*OTHERS, *INTEGERS, *FLOATS, *TEXTS)
    return rng.choice(pool)


def changed(rng: Random, value: Any) -> Any:
    """A copy with one change at a random place."""
    made = copy.deepcopy(value)
    places = places_of(made)
    path = rng.choice(places[1:]) if len(places) > 1 and rng.random() < 0.97 else ()
    if not path:
        return other_value(rng, made)
    holder, key = at(made, path[:-1]), path[-1]
    how = rng.random()
    if how < 0.72:
        holder[key] = other_value(rng, holder[key])
    elif how < 0.86:
        del holder[key]
    elif isinstance(holder, dict):
        moved = holder.pop(key) if rng.random() < 0.4 else rng.choice((None, 1, "x", [], {}))
        holder[rng.choice((*KEYS, str(key) + "x"))] = moved
    else:
        holder.insert(rng.randrange(len(holder) + 1), rng.choice((None, 1, "x", [], holder[key])))
    return made


def mutated_json(rng: Random, content: bytes) -> bytes:
    """The bytes of a JSON file with something wrong in its values, its syntax or its size."""
    value = json.loads(content)
    how = rng.random()
    if how < 0.78:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = changed(rng, value)
        return json.dumps(value).encode("utf-8")
    text = json.dumps(value)
    if how < 0.84:  # a token that Python's parser takes, and that no field can be
        places = [i for i, letter in enumerate(text) if letter == ":"]
        if places:
            place = rng.choice(places) + 1
            end = min((i for i in (text.find(",", place), text.find("}", place)) if i > 0), default=len(text))
            return text[:place].encode() + rng.choice(TOKENS) + text[end:].encode()
    if how < 0.89:
        depth = rng.choice((200, 5_000, 200_000))
        deep = "[" * depth + "]" * depth if rng.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth
        return (deep if rng.random() < 0.5 else '{"x":' + deep + "," + text[1:]).encode()
    if how < 0.93 and isinstance(value, dict) and value:  # the same name twice
        key = rng.choice(list(value))
        return f"{text[:-1]}, {json.dumps(key)}: {json.dumps(other_value(rng, value[key]))}}}".encode()
    return rng.choice((text[: rng.randrange(len(text) + 1)].encode(), text.encode("utf-16"), b"\xff" + text.encode()))


def mutated_json_line(rng: Random, content: bytes) -> bytes:
    """A file of JSON lines with something wrong in one of them."""
    lines = content.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    return b"".join([*lines[:place], mutated_json(rng, lines[place]) + b"\n", *lines[place + 1 :]])
