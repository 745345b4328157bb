"""Reads all JSON files, ours and foreign: regular files only, within size limits, checked against a type.

A problem is a ValueError (or an OSError of the file), so that each reader adds its own advice. docs/SECURITY.md lists
the limits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import stat
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

LARGEST = 256 * 2**20  # bytes; ten times the largest vocabularies in use
MOST_DIGITS = 40  # digits of an integer; a token, a size or a seed has 20 at most
DEEPEST = 100  # lists and objects inside one another; the deepest files in use have 12
MOST_PROBLEMS = 20  # in an error
SHOWN = 60  # characters of a wrong value in an error
ESCAPE = re.compile(rb"\\.", re.DOTALL)
BRACKETS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in BRACKETS)
LONG = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
Read = TypeVar("Read")


def read_json(path: Path, largest: int = LARGEST, finite: bool = True) -> Any:
    """The parsed content of a JSON file."""
    return parse_json(read_regular(path, largest), finite)


def read_object(path: Path, largest: int = LARGEST, finite: bool = True) -> dict[str, Any]:
    """The same for a file that must hold an object."""
    value = read_json(path, largest, finite)
    if not isinstance(value, dict):
        raise ValueError(f"it is {shortened(value)}, expected an object")
    return value


def read_text(path: Path, largest: int = LARGEST) -> str:
    """The text of a file in UTF-8, within the same limits."""
    return decoded(read_regular(path, largest))


def read_regular(path: Path, largest: int = LARGEST) -> bytes:
    """The bytes of a file.

    What is not a regular file is refused before it is read: opening a pipe would wait for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("not a regular file")
        if about.st_size > largest:
            raise ValueError(f"{about.st_size:,} bytes, expected at most {largest:,}")
        return file.read(about.st_size)


def parse_json(content: bytes | str, finite: bool = True) -> Any:
    """The value of a JSON text. Python's parser takes more than JSON has: all of it is refused here but, where `finite`
    is False, NaN and Infinity, which numbers of a report may be."""
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if depth_of(raw) > DEEPEST:
        raise ValueError(f"nested too deeply, expected at most {DEEPEST} lists and objects inside one another")
    try:
        value = json.loads(
            decoded(raw),
            parse_int=integer_of if LONG.search(raw) else None,  # a call for every integer takes as long as the rest
            parse_constant=no_number if finite else None,
            object_pairs_hook=object_of,
        )
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip())
        where = "it is truncated" if cut else f"{error.msg}, line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON: {where}") from error
    if SURROGATE.search(raw):
        check_text(value)
    return value


def decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason}, byte {error.start})") from error


def depth_of(content: bytes) -> int:
    """How deep lists and objects are nested, without recursion; counts up to the first syntax error."""
    if content.count(b"[") + content.count(b"{") <= DEEPEST:
        return 0
    outside = b"".join(ESCAPE.sub(b"", content).split(b'"')[::2])  # of strings
    return max(itertools.accumulate(map(BRACKETS.__getitem__, outside.translate(None, NO_BRACKETS))), default=0)


def integer_of(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits, expected at most {MOST_DIGITS}")
    return int(digits)


def no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the name {shortened(twice)} occurs twice")
    return made


def check_text(value: Any) -> None:
    """Refuses halves of surrogate pairs, which no file, terminal or tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair ({error.object[error.start]!a}), expected text") from error


def typed_from_json(kind: type[Read], value: Any, where: str = "") -> Read:
    """A value of that type from parsed JSON; raises a ValueError that lists every problem.

    Types are those of annotations: bool, int, float, str, None, Any, unions, tuples, lists, dicts with names as keys,
    and dataclasses of them. A list becomes the tuple that its annotation asks for. Fields that have a default may be
    missing; unknown fields may not be there.
    """
    problems: list[str] = []
    made = converted(kind, value, where, problems)
    if problems:
        raise ValueError(listed(problems))
    return made


def fields_from_json(kinds: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Values of those types by name, where no name has to be there; raises a ValueError that lists every problem."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {shortened(value)}, expected an object")
    problems: list[str] = []
    made = converted_names(kinds, (), value, "", problems)
    if problems:
        raise ValueError(listed(problems))
    return made


def converted(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    """The value as that type; arbitrary where a problem was noted."""
    if kind is Any:
        return value
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return converted_union(kind, value, where, problems)
    if is_typeddict(kind) and isinstance(value, dict):
        return converted_names(get_type_hints(kind), kind.__required_keys__, value, where, problems)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return converted_dataclass(kind, value, where, problems)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return converted_sequence(kind, value, where, problems)
    if origin is dict and isinstance(value, dict):
        of_key, of_value = get_args(kind)
        if all_plain(of_key, value) and all_plain(of_value, value.values()):
            return value
        return {
            converted(of_key, key, f"a name in {where}", problems): converted(
                of_value, each, inside(where, key), problems
            )
            for key, each in value.items()
        }
    if fits(kind, value):
        return float(value) if kind is float else value
    problems.append(f"{where or 'it'} is {shortened(value)}, expected {name_of(kind)}")
    return value


def converted_union(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    """As the first member that takes the value."""
    for member in get_args(kind):
        tried: list[str] = []
        made = converted(member, value, where, tried)
        if not tried:
            return made
    problems.append(f"{where or 'it'} is {shortened(value)}, expected {name_of(kind)}")
    return value


def converted_sequence(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            problems.append(f"{where or 'it'} has {len(value)} values, expected {len(arguments)}")
            return value
        kinds = arguments
    else:
        if all_plain(arguments[0], value):
            return origin(value)
        kinds = (arguments[0],) * len(value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return origin(converted(each, one, f"{where}[{place}]", problems) for place, (each, one) in pairs)


def converted_dataclass(kind: Any, value: dict[str, Any], where: str, problems: list[str]) -> Any:
    before = len(problems)
    made = converted_names(hints_of(kind), required(kind), value, where, problems)
    return kind(**made) if len(problems) == before else None


def converted_names(
    kinds: Mapping[str, Any], needed: Iterable[str], value: dict[str, Any], where: str, problems: list[str]
) -> dict[str, Any]:
    problems += [f"unknown field {inside(where, name)}" for name in sorted(value.keys() - kinds.keys())]
    problems += [f"missing field {inside(where, name)}" for name in needed if name not in value]
    return {
        name: converted(kinds[name], each, inside(where, name), problems)
        for name, each in value.items()
        if name in kinds
    }


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    named = get_type_hints(kind)
    return {field.name: named[field.name] for field in dataclasses.fields(kind)}


def required(kind: type) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield field.name


def fits(kind: Any, value: Any) -> bool:
    if kind is None or kind is types.NoneType:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    if kind is str:
        return isinstance(value, str) and is_text(value)
    return isinstance(kind, type) and not is_record(kind) and isinstance(value, kind)


def all_plain(kind: Any, values: Collection[Any]) -> bool:
    """Whether all values are of a kind that is checked for all of them at once: a vocabulary has 65,000 of them."""
    if kind is int:
        return set(map(type, values)) <= {int}
    return kind is str and set(map(type, values)) <= {str} and is_text("".join(values))


def is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or is_typeddict(kind)


def is_text(value: str) -> bool:
    """Whether a file name or a terminal can hold a string: no lone surrogate, no NUL."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def listed(problems: list[str]) -> str:
    """The first problems and the number of further ones."""
    more = len(problems) - MOST_PROBLEMS
    return "; ".join([*problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])])


def inside(where: str, name: Any) -> str:
    shown = shortened(name) if len(str(name)) > SHOWN or not str(name).isprintable() else str(name)
    return f"{where}.{shown}" if where else shown


def shortened(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) else repr(value)[: 2 * SHOWN]
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def name_of(kind: Any) -> str:
    """A type in words that a reader of JSON knows."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(name_of(member) for member in get_args(kind))
    if get_origin(kind) in (tuple, list):
        return "a list"
    if get_origin(kind) is dict or dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return "an object"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}
    return names.get(kind, str(kind))
