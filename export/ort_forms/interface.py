"""What sessions bind of the graphs in these forms, beside the contract's inputs and outputs.

Apart from the forms, which need onnx: a session whose graphs were kept does without it.
"""

from __future__ import annotations

import dataclasses

from seq2engine.model.config import ModelConfig

from ..contract import GraphSpec, TensorSpec

CANDIDATES = (
    TensorSpec("exp_sum", "float32", ("B", "K")),
    TensorSpec("best_logits", "float32", ("B", "K", "C")),
    TensorSpec("best_tokens", "int64", ("B", "K", "C")),
)
COUNT = TensorSpec("candidate_count", "int64", (1,))
WANTED = TensorSpec("wanted", "int64", (1,))
MOST = 16  # most tokens that screening can be asked for: so many are always candidates, even of logits not finite
WORTH_IT = 2_000_000  # elements of a table from which on screening pays
POSITION = TensorSpec("position", "int64", ("B", "K"))
STATES = "states"  # of a step that drafts
RECORDED = ("top_logits", "chosen_logits", "exp_sums")  # of a chain of steps; without scores only the first
# Inputs of a plan, and its outputs: what was chosen in every step [B,N], and how many steps ran [1].
PLAN = (
    TensorSpec("steps", "int64", (1,)),
    TensorSpec("target", "int64", ("B", "T")),
    TensorSpec("limit", "int64", ("B",)),
    TensorSpec("banned", "bool", ("R", "V")),
    TensorSpec("end", "int64", (1,)),
    TensorSpec("beam_steps", "int64", (1,)),
    TensorSpec("beam_rules", "int64", (3,)),
    TensorSpec("beam_norms", "float64", ("P",)),
    TensorSpec("beam_state", "int64", ("B", "I")),
    TensorSpec("beam_scores", "float64", ("B", "D")),
)
CHOSEN = (
    TensorSpec("chosen", "int64", ("B", "N")),
    TensorSpec("top_logits", "float32", ("B", "N")),
    TensorSpec("chosen_logits", "float32", ("B", "N")),
    TensorSpec("exp_sums", "float32", ("B", "N")),
    TensorSpec("ran", "int64", (1,)),
)
# The same of beam search (search/ahead/beam_plan.py): tokens and parents of every step and their log-probabilities,
# what is known of each source after the last one, and how many ran.
BEAMS = (
    TensorSpec("beam_choices", "int64", ("N", 2, "B", "K")),
    TensorSpec("beam_log_probs", "float64", ("N", "B", "K")),
    TensorSpec("new_state", "int64", ("B", "I")),
    TensorSpec("new_scores", "float64", ("B", "D")),
    TensorSpec("new_mask", "bool", ("B", "K", "L")),
    TensorSpec("beam_runs", "int64", (2,)),
)
FED = ("tokens", "position", "write_index", "self_mask")  # what a step makes of the one before it
KEYS = "cross_k."
TRANSPOSED = [0, 1, 3, 2]


def worth_screening(config: ModelConfig, precision: str) -> bool:
    """In fp32 only for a table shared with the embedding, which is stored row by row, so single rows are read fast."""
    fits = precision == "w8a8" or (precision == "fp32" and config.tie_output)
    return fits and config.target_vocab * config.d_model >= WORTH_IT


def spec_with_beam_positions(spec: GraphSpec) -> GraphSpec:
    inputs = tuple(POSITION if tensor.name == POSITION.name else tensor for tensor in spec.inputs)
    return dataclasses.replace(spec, inputs=inputs)


def specs_with_transposed_keys(specs: dict[str, GraphSpec]) -> dict[str, GraphSpec]:
    """What goes into and comes out of the two graphs in this form."""

    def transposed(tensor: TensorSpec) -> TensorSpec:
        if not tensor.name.startswith(KEYS):
            return tensor
        return dataclasses.replace(tensor, axes=tuple(tensor.axes[axis] for axis in TRANSPOSED))

    return {
        name: GraphSpec(spec.name, tuple(map(transposed, spec.inputs)), tuple(map(transposed, spec.outputs)))
        for name, spec in specs.items()
    }
