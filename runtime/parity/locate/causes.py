"""The cause of a wrong tensor: each possible cause is computed in fp64 and compared with the graph's values.

A cause is accepted only if it reproduces the tensor within the budget of a correct one, never because of a name.
Of several, the closest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, fx, nn

from seq2engine.export.debug_outputs import Call

from ..weights.rounding import HALF
from .evidence import Evidence, Guess, described
from .three_way import MASKED
from .weight_causes import linear_guesses, norm_guesses, rms_norm_guesses, table_guesses

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "the tanh form of GELU": nn.GELU(approximate="tanh"),
    "the erf form of GELU": nn.GELU(),
    "ReLU": nn.ReLU(),
    "SiLU": nn.SiLU(),
    "the sigmoid form of GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "no activation": lambda x: x,
}


@torch.inference_mode()
def cause_of(evidence: Evidence) -> Guess:
    """The candidate cause that explains the tensor best; `unknown`, with a description, if none does."""
    best, least = Guess("unknown", described(evidence), torch.zeros(())), 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        for guess in guesses_of(evidence):
            strain = evidence.strain(guess.expected)
            if strain <= 1.0 and (strain < 0.5 * least or best.cause == "unknown"):
                best, least = guess, strain
    if best.cause == "unknown" and (~np.isfinite(evidence.given) & np.isfinite(evidence.exact)).any():
        return Guess("overflow", described(evidence), best.expected)
    return best


def guesses_of(e: Evidence) -> Iterator[Guess]:
    """Specific causes before general ones: of two that explain the same, the first is taken."""
    leaf = e.leaf
    if e.given.shape != e.exact.shape:
        yield from shape_guesses(e)
        return
    if isinstance(leaf, nn.Embedding):
        yield from table_guesses(e, leaf.weight, e.call.args[0])
    elif is_table_read(e.call):
        yield from table_guesses(e, e.call.args[0], e.call.args[1])
    elif isinstance(leaf, nn.Linear):
        yield from linear_guesses(e, leaf)
    elif isinstance(leaf, nn.LayerNorm):
        yield from norm_guesses(e, leaf)
    elif isinstance(leaf, nn.RMSNorm):
        yield from rms_norm_guesses(e, leaf)
    elif isinstance(leaf, nn.Module):
        yield from (
            Guess("activation", f"{name} is computed", act(e.call.args[0])) for name, act in ACTIVATIONS.items()
        )
    elif e.target is torch.where:
        yield from mask_guesses(e)
    elif e.target == "softmax":
        for axis in (-2, -3):
            yield Guess("softmax axis", f"softmax over axis {axis}, expected -1", e.call.args[0].softmax(axis))
    elif getattr(e.target, "__name__", "") == "write_slots":
        yield from slot_guesses(e)
    yield from scale_guesses(e)
    yield from operand_guesses(e)
    yield from (Guess("swapped tensors", f"it holds what {name} should hold", x) for name, x in e.others.items())
    yield from precision_guesses(e)


def is_table_read(call: Call) -> bool:
    args = call.args
    return (
        len(args) == 2
        and isinstance(args[0], Tensor)
        and isinstance(args[1], Tensor)
        and not args[1].is_floating_point()
    )


def mask_guesses(e: Evidence) -> Iterator[Guess]:
    """The result shows which scores were masked."""
    mask, scores, _ = e.call.args
    mask = mask.expand(e.found.shape)
    seen = e.found > MASKED / 2
    shown, hidden = seen & ~mask, ~seen & mask
    expected = torch.where(seen, scores, MASKED)
    own = "self_mask" in e.fed and e.call.args[0].shape[-1] == e.fed["self_mask"].shape[-1] and mask.dim() == 4
    beams = e.fed["self_mask"].shape[1] if "self_mask" in e.fed else 1
    if bool(seen.all()):
        yield Guess("mask", "nothing is masked", expected)
    elif (
        own
        and beams > 1
        and any(
            torch.equal(seen, mask.roll(by, dims=2)) or torch.equal(seen, mask[:, :, by - 1 : by].expand_as(mask))
            for by in range(1, beams + 1)
        )
    ):
        yield Guess("ancestor mask", "beams attend to the ancestors of other beams", expected)
    elif own and beams > 1 and bool((shown | hidden).any()) and is_self_attention(e):
        count = int((shown | hidden).sum())
        yield Guess("ancestor mask", f"{count} slots are attended to by the wrong beam", expected)
    elif bool(shown.any()) and not bool(hidden.any()):
        what = "slots that are not its ancestors" if is_self_attention(e) else "padding"
        yield Guess(
            "cache slot" if is_self_attention(e) else "padding leak",
            f"{int(shown.sum())} places of {what} are attended to",
            expected,
        )
    elif bool(hidden.any()):
        yield Guess("mask", f"{int(hidden.sum())} places are masked by mistake", expected)


def is_self_attention(e: Evidence) -> bool:
    return "tokens" in e.fed and "self_attn" in e.trio.oracle.module(e.tensor)


def slot_guesses(e: Evidence) -> Iterator[Guess]:
    cache, new, index = e.call.args
    last = cache.shape[2] - new.shape[2]
    yield Guess("cache slot", "nothing is written: it is the cache of the step before", cache)
    for by in (-1, 1, -2, 2):
        moved = e.again((cache, new, (index + by).clamp(0, last)))
        yield Guess("cache slot", f"written {by:+d} slots from where it belongs", moved)
        yield Guess(
            "cache slot",
            f"written {by:+d} slots from where it belongs",
            e.again((cache, new, (index + by) % (last + 1))),
        )
    yield Guess("cache slot", "every row is written where row 0 is", e.again((cache, new, index[:1].expand_as(index))))
    yield Guess("cache slot", "always written to the first slot", e.again((cache, new, torch.zeros_like(index))))
    yield Guess("cache slot", "always written to the last slot", e.again((cache, new, torch.full_like(index, last))))


def scale_guesses(e: Evidence) -> Iterator[Guess]:
    exact = torch.from_numpy(e.exact.astype(np.float64))
    real = exact.square().sum()
    if not e.found.isfinite().all() or not real:
        return
    factor = float((exact * e.found).sum() / real)
    by = next((a for a in e.call.args if isinstance(a, float)), None)  # x * 8.0
    if by is not None:
        yield Guess("missing scale", f"it is not scaled by {by:g}", e.call.args[0])
        yield Guess("wrong scale", f"scaled by {by * factor:.6g}, expected {by:g}", exact * factor)
    elif factor > 1e-3:
        yield Guess("wrong scale", f"everything is {factor:.6g} times what it should be", exact * factor)


def operand_guesses(e: Evidence) -> Iterator[Guess]:
    """Another tensor was read as an operand; or, if the file lacks the operand, the node that computes it is absent."""
    args, graph = e.call.args, e.trio.oracle
    names = [graph.sources.get(a) if isinstance(a, fx.Node) else None for a in e.call.node.args]
    for place, name in enumerate(names):
        if name is None or not args[place].is_floating_point():
            continue
        if e.target.__class__ is not str and getattr(e.target, "__name__", "") == "add" and len(args) == 2:
            yield Guess("residual", f"{name} is not added", args[1 - place])
        if name not in e.trio.file.tensors and name in graph.calls:
            for before in graph.operands(name):
                if before in e.others and e.others[before].shape == args[place].shape:
                    swapped = e.again((*args[:place], e.others[before], *args[place + 1 :]))
                    kind = "norm" if isinstance(graph.leaf(name), nn.LayerNorm | nn.RMSNorm) else "residual"
                    yield Guess(kind, f"{name} is left out: {before} is read instead", swapped, graph.module(name))
        for other, value in {**e.fed, **e.others}.items():
            if other != name and value.shape == args[place].shape and value.dtype == args[place].dtype:
                swapped = e.again((*args[:place], value, *args[place + 1 :]))
                stale = other.startswith("self_") and other in e.fed
                kind = (
                    "cache slot"
                    if stale
                    else "residual"
                    if getattr(e.target, "__name__", "") == "add"
                    else "swapped tensors"
                )
                old = ", the cache before this step's write" if stale else ""
                yield Guess(kind, f"it reads {other}{old}, expected {name}", swapped)


def precision_guesses(e: Evidence) -> Iterator[Guess]:
    for name, dtype in HALF.items():
        rounded = tuple(
            a.to(dtype).double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in e.call.args
        )
        yield Guess("precision", f"its inputs were rounded to {name}", e.again(rounded))
        exact = torch.from_numpy(e.exact.astype(np.float64))
        yield Guess("precision", f"it is rounded to {name}", exact.to(dtype).double())


def shape_guesses(e: Evidence) -> Iterator[Guess]:
    """A tensor of another shape cannot be compared, but it may hold the same numbers."""
    detail = f"its shape is {list(e.given.shape)}, expected {list(e.exact.shape)}"
    if sorted(e.given.shape) == sorted(e.exact.shape):
        same = torch.from_numpy(e.exact.astype(np.float64)).reshape(e.given.shape)
        yield Guess("head order", f"{detail}: heads and their width are exchanged", same)
