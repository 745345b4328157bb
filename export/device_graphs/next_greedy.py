"""Greedy search on the device: the inputs of the next step from the logits of this one, with no wait for the host.

    logits -> TopK C -> not banned -> the best, of equals the lowest --+-> token -> new_tokens, new_target, new_done
    target [B,T] at `position`: a forced token, or what is banned -----+
    position [B] + 1, at most limit - 1 -> new_position, new_self_mask

`target` is both the plan and the record. At each position it holds

    0 or more   a token: forced by the host before the decode (first token, prefix, end), or chosen here
    -1 - r      open: any token but those of row r of `banned` [R,V]

so bans of the first token or of an early end are rows of their own, and no rule is evaluated while the decode runs. A
source is done after its `end` token (-1: there is none) or `limit` tokens. Further inputs change nothing: its
target is not written any more. A source without beams that change has written slots 0 to `position`, so its mask needs
no history, and `write_index` is `position`: both inputs of a step may be bound to the same memory. `slot_position` of a
model with relative positions is 0, 1, ..., L-1 then, sent once.

Scores are made by the host from what is recorded: chosen_logits - (top_logits + log(exp_sums)). A `top_logits` or
`exp_sums` that is not finite means that the model's logits are not; without scores there is only the former.
In an engine with a fixed number of beams only the first is searched; the others get the same input and are not read.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, helper

from ..contract import GraphSpec, TensorSpec
from ..ort_forms.interface import RECORDED
from .candidates import LAST, ONE, ZERO, candidate_nodes, constants_of, logits_of, node
from .tiny_graph import tiny_graph

BAN_ROWS = 4  # of `banned`: always, and also for the first free token, before the least length, and both


def next_greedy(
    vocab: int, count: int, slots: int | str, length: int | str, beams: int = 1, scores: bool = True
) -> tuple[onnx.ModelProto, GraphSpec]:
    """The graph for a cache of `slots` slots and targets of at most `length` tokens.

    Of `count` candidates one fewer may be banned. With letters for the numbers any are served (of one beam), and
    `slots`, 0, 1, ..., L-1, and `places`, 0, 1, ..., T-1, are sent once.
    """
    recorded = RECORDED if scores else RECORDED[:1]
    spec = spec_of(vocab, slots, length, beams, scores)
    nodes = [
        *candidate_nodes(scores),
        *first_beam(beams, ["best_logits", "best_tokens", *(["exp_sum"] if scores else [])]),
        *open_nodes(),
        *chosen_nodes(count),
        *next_nodes(beams),
        *record_nodes(recorded, beams),
    ]
    constants = {
        **constants_of(count),
        "two": np.array([2]),
        "open": np.array([-1]),
        "vocab": np.array([vocab]),
        "last_token": np.array([vocab - 1]),
        "barred": np.array([-np.inf], dtype=np.float32),
        "beams": np.array([1, beams]),
    }
    for name, size in (("slots", slots), ("places", length)):
        if isinstance(size, int):
            constants[name] = np.arange(size)
        else:
            spec = GraphSpec(spec.name, (*spec.inputs, TensorSpec(name, "int64", (size,))), spec.outputs)
    if beams > 1:
        assert isinstance(slots, int)
        constants["beam_slots"] = np.array([1, beams, slots])
    used = {name for each in nodes for name in each.input}
    return tiny_graph(spec, nodes, {name: array for name, array in constants.items() if name in used}), spec


def spec_of(vocab: int, slots: int | str, length: int | str, beams: int, scores: bool) -> GraphSpec:
    whole = [TensorSpec("target", "int64", ("B", length))]
    whole += [TensorSpec(name, "float32", ("B", length)) for name in (RECORDED if scores else RECORDED[:1])]
    state = [TensorSpec("position", "int64", ("B",)), TensorSpec("done", "bool", ("B",)), *whole]
    fixed = [
        TensorSpec("limit", "int64", ("B",)),
        TensorSpec("banned", "bool", (BAN_ROWS, vocab)),
        TensorSpec("end", "int64", (1,)),
    ]
    step = [
        TensorSpec("new_tokens", "int64", ("B", beams)),
        TensorSpec("new_self_mask", "bool", ("B", beams, slots)),
    ]
    updated = [TensorSpec(f"new_{tensor.name}", tensor.dtype, tensor.axes) for tensor in state]
    name = "next_greedy" if scores else "next_greedy_unscored"
    return GraphSpec(name, (logits_of(beams, vocab), *state, *fixed), (*step, *updated))


def first_beam(beams: int, names: list[str]) -> list[NodeProto]:
    """[B,K,C] or, for the sum, [B,K] -> the first beam's [B,C] or [B,1]."""
    nodes = []
    for name in names:
        first = f"{name}/first"
        cut = f"{name}/cut" if beams > 1 else name
        nodes += [node("Slice", [name, ZERO, ONE, ONE], cut)] if beams > 1 else []
        nodes.append(node("Identity", [cut], first) if name == "exp_sum" else node("Squeeze", [cut, ONE], first))
    return nodes


def open_nodes() -> list[NodeProto]:
    """The candidates' logits, -inf where they are banned at this position."""
    return [
        node("Unsqueeze", ["position", ONE], "place"),  # [B, 1]
        node("GatherElements", ["target", "place"], "code", axis=1),
        node("Sub", ["open", "code"], "any_row"),
        node("Max", ["any_row", ZERO], "row"),  # of `banned`; any for a forced token
        # One index into all rows: [B,1] * V + [B,C].
        node("Mul", ["row", "vocab"], "row_start"),
        node("Add", ["row_start", "best_tokens/first"], "cells"),
        node("Reshape", ["banned", LAST], "banned/flat"),
        node("Gather", ["banned/flat", "cells"], "is_banned"),
        node("Where", ["is_banned", "barred", "best_logits/first"], "allowed"),  # [B, C]
    ]


def chosen_nodes(count: int) -> list[NodeProto]:
    """The best candidate, of equal ones the lowest token. Written out, as TensorRT fuses no reduction here."""
    allowed = [f"allowed/{i}" for i in range(count)]
    tokens = [f"tokens/{i}" for i in range(count)]
    kept = [f"kept/{i}" for i in range(count)]
    best = [node("Max", allowed, "best")] if count > 1 else [node("Identity", allowed, "best")]
    nodes = [
        helper.make_node("Split", ["allowed"], allowed, "allowed/split", axis=1, num_outputs=count),
        helper.make_node("Split", ["best_tokens/first"], tokens, "tokens/split", axis=1, num_outputs=count),
        *best,
    ]
    for value, token, each in zip(allowed, tokens, kept, strict=True):
        nodes.append(node("Equal", [value, "best"], f"{each}/equal"))
        nodes.append(node("Where", [f"{each}/equal", token, "last_token"], each))
    # NaN equals nothing: then the last token is fed, which is one at least.
    return [*nodes, node("Min", kept, "likeliest")]  # [B, 1]


def next_nodes(beams: int) -> list[NodeProto]:
    """What the next step is fed, and which sources are done."""
    fed, attended = ("fed", "attended") if beams > 1 else ("new_tokens", "new_self_mask")
    nodes = [
        node("GreaterOrEqual", ["code", ZERO], "is_forced"),
        node("Where", ["is_forced", "code", "likeliest"], "chosen"),
        node("Unsqueeze", ["done", ONE], "was_done"),
        node("Where", ["was_done", "end", "chosen"], "token"),  # [B, 1]
        node("Max", ["token", ZERO], fed),  # an end of -1 is not a token
        node("Unsqueeze", ["limit", ONE], "most"),
        node("Add", ["place", ONE], "following"),
        node("Sub", ["most", ONE], "last_place"),
        # Computed for finished sources as well, so that only the token depends on the logits.
        node("Min", ["following", "last_place"], "next_place"),
        node("Squeeze", ["next_place", ONE], "new_position"),
        node("Equal", ["token", "end"], "ends"),
        node("GreaterOrEqual", ["following", "most"], "is_full"),
        node("Or", ["was_done", "ends"], "is_over"),
        node("Or", ["is_over", "is_full"], "is_done"),
        node("Squeeze", ["is_done", ONE], "new_done"),
        node("LessOrEqual", ["slots", "next_place"], "is_past"),  # [B, L]
        node("Unsqueeze", ["is_past", ONE], attended),
    ]
    if beams > 1:
        nodes += [
            node("Expand", [fed, "beams"], "new_tokens"),
            node("Expand", [attended, "beam_slots"], "new_self_mask"),
        ]
    return nodes


def record_nodes(recorded: tuple[str, ...], beams: int) -> list[NodeProto]:
    """The token, and what its score is made of, at its position; what is there stays where a source was done."""
    nodes = [
        node("Equal", ["places", "place"], "there"),  # [B, T]
        node("Not", ["was_done"], "goes_on"),
        node("And", ["there", "goes_on"], "here"),
        node("Where", ["here", "token", "target"], "new_target"),
        node("Slice", ["best_logits/first", ZERO, ONE, ONE], "top"),
        node("Where", ["here", "top", "top_logits"], "new_top_logits"),
    ]
    if len(recorded) > 1:
        fed = "fed" if beams > 1 else "new_tokens"
        one_beam = [node("Slice", ["logits", ZERO, ONE, ONE], "logits/cut")] if beams > 1 else []
        nodes += [
            *one_beam,
            node("Squeeze", ["logits/cut" if beams > 1 else "logits", ONE], "logits/first"),  # [B, V]
            node("GatherElements", ["logits/first", fed], "chosen_logit", axis=1),
            node("Where", ["here", "chosen_logit", "chosen_logits"], "new_chosen_logits"),
            node("Where", ["here", "exp_sum/first", "exp_sums"], "new_exp_sums"),
        ]
    return nodes
