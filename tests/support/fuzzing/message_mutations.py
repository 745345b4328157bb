"""Mutations of protobuf messages that stay messages: ONNX graphs and SentencePiece models with other fields."""

from __future__ import annotations

from random import Random
from typing import Any

import onnx
from google.protobuf.message import DecodeError, Message
from sentencepiece import sentencepiece_model_pb2

from .byte_mutations import mutated_bytes
from .json_mutations import INTEGERS, TEXTS

KINDS = {".onnx": onnx.ModelProto, ".spm": sentencepiece_model_pb2.ModelProto}
KINDS |= {".model": sentencepiece_model_pb2.ModelProto}
FLOATS = (0.0, -1.0, 1e30, -1e30, float("nan"), float("inf"), 1e-40)
OPERATORS = ("If", "Loop", "Scan", "Identity", "Add", "Reshape", "Expand", "Tile", "Range", "ConstantOfShape", "x", "")
LARGEST_TEXT = 2000  # characters; protobuf itself holds what a file holds


def mutated_message(rng: Random, content: bytes, suffix: str) -> bytes:
    """The bytes of a message with one to four fields changed; those of a file that holds none are changed as bytes."""
    message = KINDS[suffix]()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return mutated_bytes(rng, content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change(rng, rng.choice(messages_in(message)))
    made: bytes = message.SerializePartialToString()
    return made


def messages_in(message: Message) -> list[Message]:
    """The message and all inside it; of long lists, their beginning and end."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        inner = [*value[:40], *value[40:][-10:]] if field.is_repeated else [value]
        found += [each for one in inner for each in messages_in(one)]
    return found


def change(rng: Random, message: Message) -> None:
    """Changes one field of a message: mostly one that it has."""
    there = [field for field, _ in message.ListFields()]
    field = rng.choice(there if there and rng.random() < 0.85 else list(message.DESCRIPTOR.fields))
    if field.is_repeated:
        change_list(rng, getattr(message, field.name), field)
    elif rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type is None:
        put(message, field, other(rng, field, getattr(message, field.name)))
    else:
        change(rng, getattr(message, field.name))


def change_list(rng: Random, values: Any, field: Any) -> None:
    how = rng.random()
    if not values or how < 0.15:
        if field.message_type is not None:
            values.add()
        else:
            values.append(other(rng, field, None))
    elif how < 0.35:
        del values[rng.randrange(len(values))]
    elif how < 0.5 and field.message_type is not None:
        values.add().CopyFrom(rng.choice(values))
    elif how < 0.6 and len(values) > 1:  # two of them change places
        first, second = rng.sample(range(len(values)), 2)
        kept = list(values) if field.message_type is None else [copied(each) for each in values]
        kept[first], kept[second] = kept[second], kept[first]
        del values[:]
        values.extend(kept)
    elif field.message_type is not None:
        change(rng, rng.choice(values))
    else:
        place = rng.randrange(len(values))
        values[place] = other(rng, field, values[place])


def copied(message: Message) -> Message:
    made = type(message)()
    made.CopyFrom(message)
    return made


def put(message: Message, field: Any, value: Any) -> None:
    try:
        setattr(message, field.name, value)
    except ValueError:  # an enumeration or an integer that the type cannot hold
        message.ClearField(field.name)


def other(rng: Random, field: Any, old: Any) -> Any:
    """Another value of the field's type."""
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING and field.type == field.TYPE_BYTES:
        return mutated_bytes(rng, old) if isinstance(old, bytes) else b"x"
    if kind == field.CPPTYPE_STRING:
        texts = [text[:LARGEST_TEXT] for text in TEXTS if "\ud800" not in text]
        return rng.choice((*texts, *OPERATORS, old if isinstance(old, str) else "x"))
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == field.CPPTYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values])
    bits = 31 if kind in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 63
    near = (old + 1, old - 1, old * 2) if isinstance(old, int) else ()
    least = 0 if kind in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else -(1 << bits)
    return rng.choice([value for value in (*INTEGERS, *near) if least <= value < 1 << bits])
