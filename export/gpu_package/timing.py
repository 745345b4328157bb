"""How long encoder, decoder step and a whole greedy decode take on this GPU, at a few batch sizes.

Plain launches from Python; every step sends tokens and the mask to the GPU and reads the best tokens back: so it
takes longer here than in a program that keeps them on the GPU and replays its launches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from engine_steps import padded, run
from model_engines import ModelEngines

WARM_UP = 3  # runs whose times are dropped: the first ones load kernels


def timed(model: ModelEngines, rounds: int) -> list[dict[str, Any]]:
    """A row for the least, usual and most sources in a batch, at the usual source and output length."""
    widest = model.package["ranges"][0]
    steps = min(widest["target"]["opt"], model.package["decode"]["room"])
    batches = sorted({widest["batch"][kind] for kind in ("min", "opt", "max")})
    return [timed_batch(model, batch, widest["source"]["opt"], steps, rounds) for batch in batches]


def timed_batch(model: ModelEngines, batch: int, length: int, steps: int, rounds: int) -> dict[str, Any]:
    """No output ends early here, so that every round has the same work."""
    config = model.package["model"]
    sources = np.random.default_rng(0).integers(0, config["source_vocab"], (batch, length)).tolist()
    ids, mask = padded(sources, config["pad_id"], 1)
    encoder, whole, step_times = [], [], []
    for number in range(WARM_UP + rounds):
        started = time.perf_counter()
        model.encode(ids, mask)
        encoded = time.perf_counter()
        ends: list[float] = []

        def choose(best: np.ndarray, step: int, ends: list[float] = ends) -> tuple[np.ndarray, np.ndarray]:
            ends.append(time.perf_counter())
            return best[..., 0], np.zeros_like(best[..., 0])

        run(model, sources, 1, config["start_id"], steps, choose, best=True)
        if number >= WARM_UP:
            encoder.append(encoded - started)
            whole.append(time.perf_counter() - encoded)
            step_times += np.diff(ends).tolist()
    return {
        "batch": batch,
        "source": length,
        "steps": steps,
        "rounds": rounds,
        "encoder": milliseconds(encoder),
        "step": milliseconds(step_times),
        "decode": milliseconds(whole),
        "tokens_per_second": round(batch * steps / float(np.median(whole)), 1),
    }


def milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median, and the range of four fifths of them; None of nothing (a decode of one step has no step of its own)."""
    if not seconds:
        return None
    tenth, median, most = np.quantile(seconds, (0.1, 0.5, 0.9)) * 1e3
    return {"median": round(median, 4), "tenth": round(tenth, 4), "nine_tenths": round(most, 4)}


def timing_text(times: dict[str, float] | None) -> str:
    return "none" if times is None else f"{times['median']:.3g} ({times['tenth']:.3g} to {times['nine_tenths']:.3g})"
