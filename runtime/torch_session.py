"""The reference model as a session: the same protocol over plain PyTorch, in fp64, fp32 or fp16 on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import SessionError
from ..export.bundle import Bundle
from ..model.checkpoint import load_checkpoint
from ..model.layers import append_slots, write_slots
from ..model.transformer import Transformer
from .answers import Answer
from .fitting import fitted
from .session import Limits, Session, State

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
STORES = {"static": write_slots, "growing": append_slots}


class TorchSession(Session):
    """Takes the model over: it is converted to the precision in place."""

    backend = "torch"
    looks = False  # whether its states keep the cross-attention of the latest step

    def __init__(self, model: Transformer, precision: str = "fp32", cache_form: str = "static"):
        if precision not in DTYPES:
            raise SessionError(f"PyTorch runs {', '.join(DTYPES)} here, not {precision!r}")
        self.precision, self.cache_form = precision, cache_form
        self.config = model.config
        self.dtype = DTYPES[precision]
        self.model = model.to(self.dtype)
        self.limits = Limits(None, None, self.config.max_source, self.config.max_target, attention=self.looks)

    @classmethod
    def from_bundle(cls, bundle: Bundle, precision: str, threads: int | None = None) -> TorchSession:
        if threads is not None:
            torch.set_num_threads(threads)
        bundle.reference_path()  # checks the hash
        return cls(load_checkpoint(bundle.root), precision, bundle.cache_form)

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
        return Answer(logits.numpy() if self.precision == "fp64" else logits.float().numpy())

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
        return np.array(state[name].numpy())

    def close(self) -> None:
        """Nothing to release: the model goes with the session."""

    def __exit__(self, *exc: object) -> None:
        self.close()
