"""Files that torch.save may have written: odd tensors, odd entries, and code that must never run."""

from __future__ import annotations

import io
import os
import pickle
from random import Random
from typing import Any

import torch


class Code:
    """Pickled, it asks the reader to run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch canary",)


def mutated_pickle(rng: Random, content: bytes) -> bytes:
    values: Any = torch.load(io.BytesIO(content), weights_only=False)
    holder: Any = values
    for name in ("model", "model_state_dict"):
        if isinstance(values, dict) and isinstance(values.get(name), dict):
            holder = values[name]
    name = rng.choice(list(holder))
    tensor = holder[name] if isinstance(holder[name], torch.Tensor) else torch.ones(2, 3)
    others: list[Any] = [
        Code(), None, 3, "x", [], {}, tensor[:1], tensor.double(), tensor.half(), tensor.long(), tensor.bool(),
        tensor.to(torch.complex64), tensor.to("meta"), torch.empty(0), tensor.flatten(),
        tensor.expand(3, *tensor.shape),
        torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor,
        torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8), tensor.float().to_sparse(),
        torch.nn.Parameter(tensor.float()), 1, b"x", range(3), {1, 2},
    ]  # fmt: skip
    how = rng.random()
    if how < 0.6:
        holder[name] = rng.choice(others)
    elif how < 0.75:
        del holder[name]
    elif how < 0.9:
        holder[rng.choice(("x", 3, "model.encoder.layers.10000000.fc1.weight", "", "\ud800"))] = rng.choice(others)
    else:
        values = rng.choice([*others, [values]])
    if rng.random() < 0.1:
        return pickle.dumps(values)
    made = io.BytesIO()
    torch.save(values, made)
    return made.getvalue()
