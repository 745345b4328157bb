"""Mutations of safetensors files that know their structure: the length of a JSON header, types, shapes, offsets."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

from .json_mutations import changed, mutated_json

NUMBERS = (b"\xff\xff\xff\xff", b"\0\0\x80\x7f", b"\0\0\0\0", b"\xff\xff\x7f\x7f")  # float32: NaN, inf, 0, the largest
TYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "I8", "U8", "BOOL", "F4", "x")


def mutated_safetensors(rng: Random, content: bytes) -> bytes:
    """The same weights under a header in which something is wrong, or weights in which something is."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + size], content[8 + size :]
    how = rng.random()
    if how < 0.2:
        return with_header(mutated_json(rng, header), data)
    entries: dict[str, Any] = json.loads(header)
    names = [name for name in entries if name != "__metadata__"]
    entry = entries[rng.choice(names)]
    if how < 0.35:
        entries = changed(rng, entries)
    elif how < 0.5:
        entry["dtype"] = rng.choice(TYPES)
    elif how < 0.65:  # another shape of the same numbers
        count = 1
        for length in entry["shape"]:
            count *= length
        entry["shape"] = rng.choice(([count], [1, *entry["shape"]], entry["shape"][::-1], [count, 1], [0], []))
    elif how < 0.75:  # two tensors change places, or share their numbers
        other = entries[rng.choice(names)]
        entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
    elif how < 0.85:
        entries[rng.choice(("x", "", "encoder.layers.1000000.norm.weight", "a\0b"))] = dict(entry)
    elif how < 0.92:  # a tensor of no numbers has a size of 0
        entries["x"] = {"dtype": "F32", "shape": [rng.choice((0, 2**40)), 0], "data_offsets": [0, 0]}
    else:
        begin, end = entry["data_offsets"]
        odd = rng.choice(
            (b"\xff\xff\xff\xff", b"\0\0\x80\x7f", b"\0\0\0\0", b"\xff\xff\x7f\x7f")
        )  # NaN, inf, 0, largest
        data = data[:begin] + odd * ((end - begin) // 4) + data[begin + (end - begin) // 4 * 4 :]
    return with_header(json.dumps(entries).encode(), data)


def with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data
