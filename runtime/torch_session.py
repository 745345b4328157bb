"""The reference model as a session: the same protocol over plain PyTorch, in fp64, fp32, fp16 or bf16 on the CPU.

For a precision with quantised weights the reference has the weights of its graphs and computes in fp16; the
oracle (`fp64:int8`) has the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from seq2engine.errors import GraphError, SessionError
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.graph_files import graph_from_file, graph_of_ours
from seq2engine.export.contract import GRAPHS, PRECISIONS, QUANTISED, attention_name
from seq2engine.export.ort_forms.int8_matmul import SIGNED, STEPS_OF, Steps
from seq2engine.export.precision.quantise import weights_from_graph
from seq2engine.export.precision.smoothing import smoothing_from_graph
from seq2engine.model.checkpoint import load_checkpoint
from seq2engine.model.layers import FeedForward, KeyValue, append_slots, write_slots
from seq2engine.model.rounded import model_at
from seq2engine.model.transformer import Transformer

from .backends import SessionOptions
from .fitting import fitted
from .search.step_output import Shortlist, StepOutput
from .session import EVERYTHING, Limits, Session, StepForm

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    **{name: getattr(torch, PRECISIONS[name]) for name in QUANTISED},
}
P = ParamSpec("P")
R = TypeVar("R")
ENCODED = ("source_mask", "encoder_states", "cross_k.", "cross_v.")  # tensors of a state that `encode` makes
STORES = {"static": write_slots, "growing": append_slots}


@contextmanager
def threads_of_torch(count: int | None) -> Iterator[None]:
    """PyTorch computes with so many threads inside the block (None: with as many as outside it).

    PyTorch has one number for all that a thread of Python runs, so a session may set it only while it computes.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computing(method: Callable[Concatenate[TorchSession, P], R]) -> Callable[Concatenate[TorchSession, P], R]:
    """A method of a session that computes: without gradients, with the session's threads."""

    @wraps(method)
    def scoped(self: TorchSession, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(), threads_of_torch(self.threads):
            return method(self, *args, **kwargs)

    return scoped


class TorchState(dict[str, torch.Tensor]):
    """The tensors of one batch; from `reserve` on also the model whose output projection its decode needs."""

    model: Transformer
    shortlist: Shortlist | None = None


class TorchSession(Session):
    """Runs a model in fp32, or at another precision over the weights of one in fp32, which stay as they are.

    Nodes of the graphs named in `in_fp32` are computed in fp32 whatever the precision. With `attention`, a state has
    the cross-attention weights `cross_attention.i` [B,H,K,S] of every layer after a step. `smoothing` is what inputs of
    products are multiplied by before they are rounded to int8 (w8a8). Calls compute with `threads` (None: PyTorch's own
    number); outside of them PyTorch keeps its number.
    """

    backend = "torch"
    prefills = True

    def __init__(
        self,
        model: Transformer,
        precision: str = "fp32",
        cache_form: str = "static",
        in_fp32: Collection[str] = (),
        attention: bool = False,
        smoothing: Mapping[str, np.ndarray] | None = None,
        threads: int | None = None,
    ):
        if precision not in DTYPES:
            raise SessionError(f"PyTorch runs {', '.join(DTYPES)} here, not {precision!r}")
        self.precision, self.cache_form, self.threads = precision, cache_form, threads
        self.prefills_rows = cache_form == "static"
        self.config = model.config
        self.dtype = DTYPES[precision]
        self.model = model if precision == "fp32" else model_at(model, self.dtype, in_fp32)
        if precision == "w8a8":
            round_rows(self.model, smoothing or {})
        self.limits = Limits(None, None, self.config.max_source, self.config.max_target, attention=attention)
        self.latest: tuple[Shortlist, Transformer] | None = None  # the model with the latest shortlist's projection

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        precision: str,
        threads: int | None = None,
        attention: bool = False,
        model: Transformer | None = None,
    ) -> TorchSession:
        """`model` is what `model_with_weights_of` gave for the same bundle and weights, to have them only once."""
        computes_in, _, _ = precision.partition(":")
        graphs = GRAPHS if computes_in in bundle.precisions else ()
        fallbacks = {node for graph in graphs for node in bundle.graph(computes_in, graph).fp32_nodes}
        weights = model or model_with_weights_of(bundle, weights_of(precision))
        smoothing = smoothing_of(bundle) if computes_in == "w8a8" else None
        return cls(weights, computes_in, bundle.cache_form, fallbacks, attention, smoothing, threads)

    def model_for(self, shortlist: Shortlist | None) -> Transformer:
        """The model with an output projection of these tokens alone; the latest is kept."""
        if shortlist is None:
            return self.model
        if self.latest is None or self.latest[0] != shortlist:
            model = copy.copy(self.model)  # shares all modules but the output
            model._modules = {**self.model._modules, "output": projection_of(self.model.output, shortlist)}
            self.latest = shortlist, model
        return self.latest[1]

    @computing
    def encode(self, source: np.ndarray, source_mask: np.ndarray) -> TorchState:
        mask = torch.from_numpy(source_mask)
        states, cross = self.model.encode(torch.from_numpy(source), mask)
        state = TorchState(source_mask=mask, encoder_states=states)
        for i, (k, v) in enumerate(cross):
            state[f"cross_k.{i}"], state[f"cross_v.{i}"] = k, v
        return state

    @computing
    def reserve(self, state: TorchState, slots: int, form: StepForm = EVERYTHING) -> None:
        state.shortlist, state.model = form.shortlist, self.model_for(form.shortlist)
        shape = (len(state["source_mask"]), self.config.heads, slots, self.config.head_dim)
        for i in range(self.config.decoder_layers):
            for part in "kv":
                state[f"self_{part}.{i}"] = torch.zeros(shape, dtype=self.dtype)

    def kept(self, state: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, list[KeyValue], list[KeyValue]]:
        """What a step reads of a state: the source's mask, and keys and values of every layer, cross and self."""
        layers = range(self.config.decoder_layers)
        cross, own = ([(state[f"{kind}_k.{i}"], state[f"{kind}_v.{i}"]) for i in layers] for kind in ("cross", "self"))
        return state["source_mask"], cross, own

    @computing
    def step(
        self,
        state: TorchState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        slot_position: np.ndarray | None = None,
    ) -> StepOutput:
        slots = None if slot_position is None else torch.from_numpy(slot_position)
        with self.attention_weights() as weights:
            logits, cache = state.model.decode_step(
                torch.from_numpy(tokens),
                torch.from_numpy(position),
                torch.from_numpy(write_index),
                torch.from_numpy(self_mask),
                *self.kept(state),
                STORES[self.cache_form],
                slots,
            )
        state.update(weights)
        return self.output(state, logits, cache)

    @computing
    def prefill(
        self,
        state: TorchState,
        tokens: np.ndarray,
        position: np.ndarray,
        write_index: np.ndarray,
        self_mask: np.ndarray,
        row: int | None = None,
    ) -> StepOutput:
        part = state if row is None else {name: tensor[row : row + 1] for name, tensor in state.items()}
        logits, cache = state.model.prefill(
            torch.from_numpy(tokens),
            torch.from_numpy(position),
            torch.from_numpy(write_index),
            torch.from_numpy(self_mask),
            *self.kept(part),
            STORES[self.cache_form],
        )
        if row is not None:
            for i, own in enumerate(cache):
                for name, tensor in zip((f"self_k.{i}", f"self_v.{i}"), own, strict=True):
                    state[name][row] = tensor[0]
            cache = []
        return self.output(state, logits, cache)

    def output(self, state: TorchState, logits: torch.Tensor, cache: list[KeyValue]) -> StepOutput:
        for i, (k, v) in enumerate(cache):
            state[f"self_k.{i}"], state[f"self_v.{i}"] = k, v
        # Logits of an oracle are fp64; all others are fp32, as those of the graphs.
        raw = logits.numpy() if self.precision == "fp64" else logits.float().numpy()
        return StepOutput(raw, shortlist=state.shortlist)

    @contextmanager
    def attention_weights(self) -> Iterator[dict[str, torch.Tensor]]:
        """The cross-attention weights of what runs inside the block, by name; none where they are not asked for."""
        weights: dict[str, torch.Tensor] = {}

        def hook_of(name: str) -> Any:
            def hook(module: Any, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
                x, k, _, mask = given
                weights[name] = module.attention_weights(x, k, mask)

            return hook

        with ExitStack() as hooks:
            for i in range(self.config.decoder_layers if self.limits.attention else 0):
                attention = self.model.get_submodule(f"decoder.{i}.cross_attn")
                hooks.enter_context(attention.register_forward_hook(hook_of(attention_name(i))))
            yield weights

    @computing
    def select(self, state: TorchState, rows: np.ndarray | None, slots: np.ndarray | None) -> None:
        if rows is not None:
            kept = torch.from_numpy(rows)
            state.update({name: tensor.index_select(0, kept) for name, tensor in state.items()})
        if slots is not None:
            index = torch.from_numpy(slots)[:, None, :, None]
            for name in [name for name in state if name.startswith("self_")]:
                tensor = state[name]
                state[name] = tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[3]))

    @computing
    def replace(self, state: TorchState, rows: np.ndarray, newcomers: TorchState, width: int) -> None:
        index = torch.from_numpy(rows)
        for name, coming in newcomers.items():
            if not name.startswith(ENCODED):
                continue
            axis = 1 if coming.ndim < 4 else 2  # of S in [B,S], [B,S,D] and [B,H,S,E]
            wide = fitted(state[name], axis, width, torch.zeros)
            state[name] = wide.index_copy(0, index, fitted(coming, axis, width, torch.zeros))

    def tensor(self, state: TorchState, name: str) -> np.ndarray:
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
    """The weights of a precision of PyTorch: "" for the checkpoint's, or the name of a quantised precision."""
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


def smoothing_of(bundle: Bundle) -> dict[str, np.ndarray]:
    """The smoothing factors of the w8a8 graphs, by linear layer."""
    found: dict[str, np.ndarray] = {}
    for graph in GRAPHS:
        path = bundle.graph_path("w8a8", graph)
        found |= smoothing_from_graph(graph_from_file(path), path.parent)
    return found


def round_rows(model: Transformer, smoothing: Mapping[str, np.ndarray]) -> None:
    """Makes every linear layer round its input row by row, like the int8 matmuls of the CPU form."""
    kinds = {nn.ReLU: STEPS_OF["Relu"], nn.GELU: STEPS_OF["Gelu"], nn.SiLU: STEPS_OF["Silu"]}
    activated = {
        f"{path}.down": kinds[type(module.activation)]
        for path, module in model.named_modules()
        if isinstance(module, FeedForward) and not module.gated
    }
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            factors = torch.from_numpy(smoothing[path].copy()) if path in smoothing else None
            module.register_forward_pre_hook(partial(rounded_input, activated.get(path, SIGNED), factors))


def rounded_input(
    steps: Steps, factors: torch.Tensor | None, module: nn.Module, given: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    x = given[0] if factors is None else given[0] * factors
    scale = (x.abs() if steps.lowest is None else x).amax(dim=-1, keepdim=True)
    scale = scale.clamp(min=max(steps.least, torch.finfo(scale.dtype).tiny))  # a row of zeros stays one
    x = (x / scale * steps.above).round() / steps.above * scale
    return (x if factors is None else x / factors, *given[1:])


@torch.no_grad()
def take_quantised_weights(model: Transformer, bundle: Bundle, precision: str) -> None:
    """Gives a model the weights of a bundle's quantised graphs, after checking that they are its own, rounded."""
    for graph in GRAPHS:
        path = bundle.graph_path(precision, graph)
        with graph_of_ours(path):
            found = weights_from_graph(graph_from_file(path, weights=True))
        for name, stored in found.items():
            weight = model.get_parameter(name)
            given, furthest = (torch.from_numpy(np.ascontiguousarray(a)) for a in (stored.array, stored.furthest))
            if not ((given - weight).abs() <= 1.01 * furthest + 2.0**-24).all():
                raise GraphError(
                    f"{name} of the {precision} {graph} graph is not the checkpoint's, rounded; "
                    f"export again with: seq2engine export CHECKPOINT {bundle.root} --force",
                    graph,
                )
            weight.copy_(given)


def session_from_bundle(bundle: Bundle, precision: str, options: SessionOptions) -> Session:
    """The session of a bundle that the options ask for."""
    return TorchSession.from_bundle(bundle, precision, options.threads, attention=options.attention)
