"""Decodes the recorded sources and compares the whole outputs with those of the model in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from greedy import check_decode, decoded
from model_engines import ModelEngines
from tokenizer import Tokenizer


def decode_samples(model: ModelEngines, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A row for every recorded source.

    It passes if its output is the recorded one, or leaves it at a tie: at a token that the reference has as good as
    equal with its own. What follows a tie is another output.
    """
    decode = check_decode(model.package)
    samples = model.package["decodes"]
    outputs = decoded(model, [sample["source"] for sample in samples], longest=decode["sample_length"])
    rows = []
    for sample, output in zip(samples, outputs, strict=True):
        passed, detail = compared(sample, output, decode["allowed_margin"])
        if sample["text"] is not None and tokenizer.encode(sample["text"], None) != sample["source"]:
            passed, detail = False, "the tokenizer makes other ids of the text than were recorded"
        rows.append(
            {
                "source": sample["text"] or " ".join(map(str, sample["source"])),
                "output": tokenizer.decode(output),
                "expected": tokenizer.decode(sample["tokens"]),
                "tokens": output,
                "passed": passed,
                "detail": detail,
            }
        )
    return rows


def compared(sample: Any, output: Sequence[int], margin: float) -> tuple[bool, str]:
    expected = sample["tokens"]
    if list(output) == expected:
        return True, "the same tokens"
    place = next((i for i, (a, b) in enumerate(zip(output, expected, strict=False)) if a != b), None)
    if place is None:
        return False, f"{len(output)} tokens, expected {len(expected)}"
    logits = dict(zip(*sample["best"][place], strict=True))  # token -> the reference's logit
    gap = logits[expected[place]] - logits.get(output[place], float("-inf"))
    if gap <= margin:
        return True, f"a tie at token {place + 1}: the reference has them {gap:.2g} apart"
    return False, f"token {place + 1} is {output[place]}, expected {expected[place]}"
