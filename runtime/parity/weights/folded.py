"""Whether a folded cross-attention query (export/trt_forms/fold_query.py) still computes the query.

The parts that were only widened must equal the file's bitwise. Products of weights are tested on inputs: for some
x and a, the query by the file's weights (product, norm, product) and by the folded ones must agree within the rounding
of the folded weights.
"""

from __future__ import annotations

import numpy as np

from .stored import StoredGraph

PROBES = 16  # inputs tried
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # rounding of stored weights, doubled
PARTS = ("qkv_and_q", "qkv_bias", "out_and_q", "q_inside", "q_outside", "gain", "bias", "epsilon")


def folded_problems(added: list[str], have: StoredGraph, file: StoredGraph) -> tuple[list[tuple[str, str]], set[str]]:
    """Wrong tensors with their problems, and the names of all that were compared with
    the file's."""
    layers = sorted({name.split("/")[1] for name in added if name.split("/")[1].startswith("decoder.")})
    problems: list[tuple[str, str]] = []
    known: set[str] = set()
    for layer in layers:
        known |= {f"trt/{layer}/{part}" for part in PARTS}
        problems += layer_problems(layer, have, file)
    return problems, known


def layer_problems(layer: str, have: StoredGraph, file: StoredGraph) -> list[tuple[str, str]]:
    folded = {part: have.array(f"trt/{layer}/{part}") for part in PARTS}
    kind = folded["gain"].dtype.name
    real = {part: array.astype(np.float64) for part, array in folded.items()}
    own = {name: stored(file, f"{layer}.{name}") for name in (
        "self_attn.qkv.weight", "self_attn.qkv.bias", "self_attn.out.weight", "self_attn.out.bias",
        "self_residual.norm.weight", "self_residual.norm.bias", "cross_attn.q.weight", "cross_attn.q.bias",
    )}  # fmt: skip
    qkv, out = own["self_attn.qkv.weight"], own["self_attn.out.weight"]  # [in, out], as a product reads them
    copies = {
        "qkv_and_q": (real["qkv_and_q"][:, : qkv.shape[1]], qkv),
        "qkv_bias": (real["qkv_bias"], own["self_attn.qkv.bias"]),
        "out_and_q": (real["out_and_q"][:, : out.shape[1]], out),
        "gain": (real["gain"], own["self_residual.norm.weight"]),
        "bias": (real["bias"], own["self_residual.norm.bias"]),
    }
    found = [
        (f"trt/{layer}/{part}", "its part of the file's weights has other numbers")
        for part, (theirs, ours) in copies.items()
        if not np.array_equal(theirs.ravel(), ours.ravel())
    ]
    return found or probed(layer, real, own, file, kind)


def stored(file: StoredGraph, name: str) -> np.ndarray:
    return file.array(name).astype(np.float64)


def probed(
    layer: str, folded: dict[str, np.ndarray], own: dict[str, np.ndarray], file: StoredGraph, kind: str
) -> list[tuple[str, str]]:
    qkv, out, q = (own[name] for name in ("self_attn.qkv.weight", "self_attn.out.weight", "cross_attn.q.weight"))
    norm = next(n for n in file.model.graph.node if n.name == f"{layer}.self_residual.norm/LayerNormalization")
    epsilon = next(a.f for a in norm.attribute if a.name == "epsilon")
    scaling = next(n for n in file.model.graph.node if n.name == f"{layer}.cross_attn/Mul")
    scale = float(stored(file, scaling.input[1]))
    if not np.isclose(float(folded["epsilon"]), epsilon, rtol=1e-6):
        return [(f"trt/{layer}/epsilon", f"it is {float(folded['epsilon']):g}, expected {epsilon:g}")]
    rng = np.random.default_rng(0)
    x, a = rng.normal(size=(PROBES, qkv.shape[0])), rng.normal(size=(PROBES, out.shape[0]))
    s = x + a @ out + own["self_attn.out.bias"]
    centred = s - s.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + epsilon)
    y = centred / deviation * own["self_residual.norm.weight"] + own["self_residual.norm.bias"]
    wanted = (y @ q + own["cross_attn.q.bias"]) * scale
    w, ow = folded["qkv_and_q"][:, qkv.shape[1] :], folded["out_and_q"][:, out.shape[1] :]
    inside, outside = folded["q_inside"].ravel(), folded["q_outside"].ravel()
    given = (x @ w + a @ ow + inside) / deviation + outside
    size = (np.abs(x) @ np.abs(w) + np.abs(a) @ np.abs(ow) + np.abs(inside)) / deviation + np.abs(outside)
    if (np.abs(given - wanted) <= EPSILON[kind] * size).all():
        return []
    return [(f"trt/{layer}/qkv_and_q", "the folded query is not cross-attention's query")]
