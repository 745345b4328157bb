"""The device graphs that are built with a decoder step for the same shapes, and the searches that they serve."""

from __future__ import annotations

import onnx

from ..artifact.passport import Reduction
from ..artifact.profiles import ShapeRanges
from ..contract import GraphSpec, TensorSpec
from .candidates import LEAST, candidate_count, candidates
from .gathers import gather_slots
from .next_greedy import next_greedy
from .tree_mask import tree_mask

CACHE = "cache"  # of `gather_slots`: one tensor of the cache, and it runs once for each


def graphs_of_engine(
    step: GraphSpec, cache_form: str, ranges: ShapeRanges, slots: int
) -> dict[str, tuple[onnx.ModelProto, GraphSpec]]:
    """Graphs by name (contract.DEVICE_GRAPHS) for a decoder step that takes these ranges.

    A growing cache has another shape in every step, which only the host knows: its mask and its greedy search stay
    there.
    """
    vocab = vocab_of(step)
    # As long as the step leaves it: where sources take rows, a growing cache is compacted after its longest step, too.
    one_cache = TensorSpec(CACHE, step.input("self_k.0").dtype, step.output("new_self_k.0").axes)
    made = [candidates(vocab, candidate_count(ranges.beam.max, vocab)), gather_slots([one_cache])]
    if cache_form == "static":
        greedy = vocab, min(LEAST, vocab), slots, ranges.target.max, ranges.beam.min
        relative = any(tensor.name == "slot_position" for tensor in step.inputs)
        made += [next_greedy(*greedy), next_greedy(*greedy, scores=False), tree_mask(slots, relative)]
    return {spec.name: (model, spec) for model, spec in made}


def reductions_of_engine(step: GraphSpec, cache_form: str, ranges: ShapeRanges) -> dict[str, Reduction]:
    """The reductions of the logits, smallest transfer first: a search takes the first that serves it."""
    vocab = vocab_of(step)
    seen, wide = min(LEAST, vocab), candidate_count(ranges.beam.max, vocab)
    spare = wide - ranges.beam.max - 1
    ranked = f"greedy and beam search; at beam {ranges.beam.max} up to {spare} banned tokens"
    rest = "sampling, alternatives, phrases, tries, allowed lists, repetition rules, shortlists"
    found = {"candidates": Reduction(wide, ranked), "logits": Reduction(vocab, rest)}
    if cache_form == "growing":
        return found
    greedy = f"greedy search without a wait for each token; forced tokens, up to {max(0, seen - 2)} banned ones"
    return {"next_greedy": Reduction(seen, greedy), **found}


def vocab_of(step: GraphSpec) -> int:
    vocab = step.output("logits").axes[-1]
    assert isinstance(vocab, int)
    return vocab
