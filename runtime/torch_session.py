"""The reference model as a session: the same protocol over plain PyTorch, in fp64, fp32, fp16 or bf16 on the CPU.

Of a precision with quantised weights the reference has the weights that its graphs have, and computes in fp16; the
oracle (`fp64:int8`) has them, too.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import numpy as np
import onnx
import torch
from torch import nn

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.contract import GRAPHS, PRECISIONS, QUANTISED, STORED
from seq2engine.export.ort_forms.int8_matmul import STEPS
from seq2engine.export.precision.quantise import scheme_of, weights_from_graph
from seq2engine.model.checkpoint import load_checkpoint
from seq2engine.model.layers import append_slots, write_slots
from seq2engine.model.transformer import Transformer

from .fitting import fitted
from .search.step_output import Answer, Shortlist
from .session import Limits, Session, State
from .torch_weights import model_at

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    **{name: getattr(torch, PRECISIONS[name]) for name in QUANTISED},
}
STORES = {"static": write_slots, "growing": append_slots}


class TorchSession(Session):
    """Runs a model in fp32, or at another precision over the weights of one in fp32, which stay as they are.

    Nodes of the graphs named in `in_fp32` are computed in fp32 whatever the precision.
    """

    backend = "torch"
    looks = False  # whether its states keep the cross-attention of the latest step

    def __init__(
        self,
        model: Transformer,
        precision: str = "fp32",
        cache_form: str = "static",
        in_fp32: Collection[str] = (),
    ):
        if precision not in DTYPES:
            raise SessionError(f"PyTorch runs {', '.join(DTYPES)} here, not {precision!r}")
        self.precision, self.cache_form = precision, cache_form
        self.config = model.config
        self.dtype = DTYPES[precision]
        self.model = model if precision == "fp32" else model_at(model, self.dtype, in_fp32)
        if precision == "w8a8":
            round_rows(self.model)
        self.limits = Limits(None, None, self.config.max_source, self.config.max_target, attention=self.looks)
        self.view: TorchSession | None = None  # with the latest shortlist

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, precision: str, threads: int | None = None, model: Transformer | None = None
    ) -> TorchSession:
        """`model` is what `model_with_weights_of` gave for the same bundle and weights, to have them only once."""
        if threads is not None:
            torch.set_num_threads(threads)
        computes_in, _, _ = precision.partition(":")
        graphs = GRAPHS if computes_in in bundle.precisions else ()
        fallbacks = {node for graph in graphs for node in bundle.graph(computes_in, graph).islands}
        weights = model or model_with_weights_of(bundle, weights_of(precision))
        return cls(weights, computes_in, bundle.cache_form, fallbacks)

    def shortlisted(self, shortlist: Shortlist) -> TorchSession:
        if self.view is None or self.view.shortlist != shortlist:
            model = copy.copy(self.model)  # shares all modules but the output
            model._modules = {**self.model._modules, "output": projection_of(self.model.output, shortlist)}
            self.view = copy.copy(self)
            self.view.model, self.view.shortlist = model, shortlist
        return self.view

    @torch.inference_mode()
    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray) -> State:
        mask = torch.from_numpy(source_mask)
        states, cross = self.model.encode(torch.from_numpy(source_ids), mask)
        state: State = {"source_mask": mask, "encoder_states": states}
        for i, (k, v) in enumerate(cross):
            state[f"cross_k.{i}"], state[f"cross_v.{i}"] = k, v
        return state

    @torch.inference_mode()
    def reserve(self, state: State, slots: int) -> None:
        shape = (len(state["source_mask"]), self.config.heads, slots, self.config.head_dim)
        for i in range(self.config.decoder_layers):
            for part in "kv":
                state[f"self_{part}.{i}"] = torch.zeros(shape, dtype=self.dtype)

    @torch.inference_mode()
    def step(
        self, state: State, tokens: np.ndarray, position: np.ndarray, write_index: np.ndarray, self_mask: np.ndarray
    ) -> Answer:
        layers = range(self.config.decoder_layers)
        logits, cache = self.model.decode_step(
            torch.from_numpy(tokens),
            torch.from_numpy(position),
            torch.from_numpy(write_index),
            torch.from_numpy(self_mask),
            state["source_mask"],
            [(state[f"cross_k.{i}"], state[f"cross_v.{i}"]) for i in layers],
            [(state[f"self_k.{i}"], state[f"self_v.{i}"]) for i in layers],
            STORES[self.cache_form],
        )
        for i, (k, v) in enumerate(cache):
            state[f"self_k.{i}"], state[f"self_v.{i}"] = k, v
        # An oracle in fp64 answers in fp64; everything else leaves in fp32, as the graphs do.
        raw = logits.numpy() if self.precision == "fp64" else logits.float().numpy()
        return Answer(raw, shortlist=self.shortlist)

    @torch.inference_mode()
    def select(self, state: State, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        if rows is not None:
            kept = torch.from_numpy(rows)
            state.update({name: tensor.index_select(0, kept) for name, tensor in state.items()})
        if slots is not None:
            index = torch.from_numpy(slots)[:, None, :, None]
            for name in [name for name in state if name.startswith("self_")]:
                tensor = state[name]
                state[name] = tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[3]))

    @torch.inference_mode()
    def replace(self, state: State, rows: np.ndarray, newcomers: State, width: int) -> None:
        index = torch.from_numpy(rows)
        for name, coming in newcomers.items():
            state[name] = fitted(state[name], width).index_copy(0, index, fitted(coming, width))

    def tensor(self, state: State, name: str) -> np.ndarray:
        found = state[name]
        return np.array((found.float() if found.dtype == torch.bfloat16 else found).numpy())  # numpy has no bfloat16

    def close(self) -> None:
        """Nothing to release: the model goes with the session."""

    def __exit__(self, *exc: object) -> None:
        self.close()


@torch.no_grad()
def projection_of(output: nn.Linear, shortlist: Shortlist) -> nn.Linear:
    """The rows of an output projection that belong to these tokens."""
    rows = torch.from_numpy(shortlist.ids)
    made = copy.copy(output)
    made._parameters = {**output._parameters, "weight": nn.Parameter(output.weight[rows])}
    if output.bias is not None:
        made._parameters["bias"] = nn.Parameter(output.bias[rows])
    made.out_features = len(rows)
    return made


def weights_of(precision: str) -> str:
    """Whose weights a precision of PyTorch has: "" for the checkpoint's, or a quantised precision's name."""
    computes_in, _, weights = precision.partition(":")
    if weights and weights not in QUANTISED:
        raise SessionError(f"PyTorch takes the weights of {', '.join(QUANTISED)} graphs here, not of {weights!r}")
    return weights or (computes_in if computes_in in QUANTISED else "")


def model_with_weights_of(bundle: Bundle, weights: str) -> Transformer:
    """The bundle's reference in fp32, with the checkpoint's weights ("") or those of a quantised precision's graphs."""
    bundle.reference_path()  # checks the hash
    model = load_checkpoint(bundle.root)
    if weights:
        take_quantised_weights(model, bundle, weights)
    return model


def round_rows(model: Transformer) -> None:
    """Has every product round what it is given, row by row, as the CPU form of the graphs does."""

    def rounded(module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        scale = given[0].abs().amax(dim=-1, keepdim=True)
        scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a row of zeros stays one
        return ((given[0] / scale * STEPS).round() / STEPS * scale, *given[1:])

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(rounded)


@torch.no_grad()
def take_quantised_weights(model: Transformer, bundle: Bundle, precision: str) -> None:
    """Gives a model the weights of a bundle's quantised graphs, after a look that they are its own, rounded."""
    for graph in GRAPHS:
        for name, array in weights_from_graph(onnx.load(bundle.graph_path(precision, graph))).items():
            weight = model.get_parameter(name)
            given = torch.from_numpy(np.ascontiguousarray(array))
            furthest = scheme_of(precision, STORED[precision]).rounding * weight.abs().amax(dim=1, keepdim=True)
            if not ((given - weight).abs() <= 1.01 * furthest + 2.0**-24).all():
                raise SessionError(
                    f"{name} of the {precision} {graph} graph is not the checkpoint's, rounded; "
                    f"export again with: seq2engine export CHECKPOINT {bundle.root} --force"
                )
            weight.copy_(given)
