"""Runs this package's engines on recorded inputs and compares every tensor, step by step, with the model in fp64.

    python verify.py            needs numpy and `tensorrt` or `tensorrt_rtx`, whichever built the engines

Expected values were recorded from the model in fp64. Errors are in units of each element's scale, also recorded.
A tensor passes if the median, 90th percentile and maximum of its errors are at most a factor times the
error that PyTorch makes at the same precision on the same inputs: the numbers are in package.json. Logits count where a
search could choose their token: those of masked tokens may be -inf or any low number.
Exit code 0: all passed. 1: something failed, or could not be run. One report of everything: python run_all.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from package_files import HERE, PackageError, load_for, read_engines, read_package

# First: it reports in one line what is not installed.
# isort: split
import numpy as np
from cuda_memory import Cuda, CudaError
from greedy import check_decode, decoded
from machine import machine_facts, machine_line
from model_engines import Cache, ModelEngines, Places
from tokenizer import Tokenizer
from trt_engine import EngineFailed


def main(argv: Sequence[str] | None = None, cudart: Any = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Verifies the engines of this package.")
    parser.add_argument("--flavour", help="which engines, where there are several (see the folder engines)")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    args = parser.parse_args(argv)
    try:
        package = read_package()
        folder, built = read_engines(package, args.flavour)
        trt = load_for(built)
        with Cuda(cudart) as cuda:
            facts = machine_facts(package, trt, cuda, built)
            with ModelEngines(package, cuda, trt, folder, built) as model:
                print(machine_line(facts))
                checks = Verification(model).run()
        where = f"{trt.__name__} {trt.__version__} on {cuda.capability}"
        passed = print_checks(checks, where)
        if args.json is not None:
            found = {"where": where, "machine": facts, "passed": passed, "checks": checks}
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    except (PackageError, EngineFailed, CudaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if passed else 1


def print_checks(checks: Sequence[Mapping[str, Any]], where: str) -> bool:
    for check in checks:
        print(f"{'PASS' if check['passed'] else 'FAIL'}  {check['check']:<36}  {check['detail']}")
    failed = [check for check in checks if not check["passed"]]
    print(f"{'FAIL' if failed else 'PASS'}: {where}: {len(checks) - len(failed)} of {len(checks)} checks passed")
    return not failed


class Verification:
    """Both engines over all recorded batches; errors are gathered by tensor and compared with budgets at the end."""

    def __init__(self, model: ModelEngines):
        self.model, self.package = model, model.package
        self.errors: dict[str, list[np.ndarray]] = {name: [] for name in self.package["budgets"]}
        self.same_tokens: list[bool] = []
        self.ties = 0

    def run(self) -> list[dict[str, Any]]:
        for sample in self.package["samples"]:
            with np.load(HERE / sample) as arrays:
                self.run_batch({name: arrays[name] for name in arrays.files})
        checks = [self.checked(name, budget) for name, budget in self.package["budgets"].items()]
        right = int(sum(self.same_tokens))
        detail = f"{right} of {len(self.same_tokens)} sources have the reference's tokens, {self.ties} ties"
        checks.append({"check": "tokens", "passed": right == len(self.same_tokens), "detail": detail})
        return checks

    def run_batch(self, batch: dict[str, np.ndarray]) -> None:
        encoded = self.encoded(batch)
        batch_size, beams = batch["tokens"].shape[1:]
        going, right = np.ones(batch_size, dtype=bool), np.ones(batch_size, dtype=bool)
        cache = Cache(self.model, batch_size, beams, len(batch["tokens"]))
        for step in range(len(batch["tokens"])):
            given = {name: batch[name][step] for name in ("tokens", "position", "write_index")}
            given["self_mask"] = np.ascontiguousarray(batch["self_mask"][step][:, :, : cache.attended])
            if "slot_position" in batch:
                given["slot_position"] = np.ascontiguousarray(batch["slot_position"][step][:, : cache.attended])
            logits = self.model.step(encoded, cache, given)
            self.gather_logits(batch, step, logits)
            agreed = self.agreed(batch, step, logits)
            right &= agreed.all(axis=1) | ~going
            going &= batch["top_ids"][step, :, 0, 0] != self.package["end_id"]
        written = beams * len(batch["tokens"])
        for name in cache.names:
            arrays = (by_position(array) for array in (cache.array(name)[:, :, :written], batch[name]))
            found, exact = (array.reshape(-1, *array.shape[2:]) for array in arrays)
            self.gather(f"decoder_step {name}", found, exact, batch[f"{name}.scale"])
        self.same_tokens += list(right)

    def encoded(self, batch: dict[str, np.ndarray]) -> Places:
        """Runs the encoder and checks its outputs."""
        real = batch["source_mask"]
        places = self.model.encode(batch["source_ids"], real)
        for tensor in self.model.graphs["encoder"]["outputs"]:
            name = tensor["name"]
            found, exact = by_position(self.model.downloaded(name, *places[name])), by_position(batch[name])
            self.gather(f"encoder {name}", found[real], exact[real], batch[f"{name}.scale"])
        return places

    def agreed(self, batch: dict[str, np.ndarray], step: int, logits: np.ndarray) -> np.ndarray:
        """Beams [B,K] whose best token is the reference's, or one that rounding could swap it with."""
        ids = batch["top_ids"][step]  # [B,K,N], best first
        values = batch["logits"][step][:, :, -ids.shape[-1] :]
        found = np.nan_to_num(logits, nan=-np.inf).argmax(axis=-1)
        among = found[:, :, None] == ids
        place = np.where(among.any(axis=-1), among.argmax(axis=-1), ids.shape[-1] - 1)
        margin = values[:, :, 0] - np.take_along_axis(values, place[:, :, None], axis=-1)[:, :, 0]
        equal, close = found == ids[:, :, 0], margin <= batch["allowed_margin"][step]
        self.ties += int((close & ~equal)[:, 0].sum())
        return (equal | close) & (logits < np.inf).all(axis=-1)  # NaN is not less; -inf is a token that is masked

    def gather_logits(self, batch: dict[str, np.ndarray], step: int, logits: np.ndarray) -> None:
        """The columns [B,K,C] that were recorded, and the best; what is out of reach on both sides does not count."""
        best = np.take_along_axis(logits, batch["top_ids"][step], axis=-1)
        found = np.concatenate([logits[:, :, batch["columns"]], best], axis=-1).astype(np.float64)
        exact, lowest = batch["logits"][step], batch["logits.lowest"][step][:, :, None]
        found = np.maximum(found, lowest)  # NaN stays NaN
        counts = (found != lowest) | (exact != lowest)
        scale = np.broadcast_to(batch["logits.scale"][step][:, :, None], exact.shape)
        self.gather(f"decoder_step logits, step {step}", found[counts], exact[counts], scale[counts])

    def gather(self, name: str, found: np.ndarray, exact: np.ndarray, scale: np.ndarray) -> None:
        """Arrays [rows, ...] and the scales of the rows [rows] -> errors in units of each element's scale."""
        units = np.maximum(np.abs(exact), scale.reshape(-1, *[1] * (exact.ndim - 1)))
        with np.errstate(invalid="ignore"):
            errors = np.abs(found.astype(np.float64) - exact) / units
        errors[~np.isfinite(errors)] = np.inf  # NaN counts as the largest error
        self.errors[name].append(errors.ravel())

    def checked(self, name: str, budget: Mapping[str, float]) -> dict[str, Any]:
        errors = np.concatenate(self.errors[name])
        middle, most = np.quantile(errors, (0.5, 0.9), method="inverted_cdf")
        found = {"median": float(middle), "most": float(most), "worst": float(errors.max())}
        names = {"median": "median", "most": "90th percentile", "worst": "maximum"}
        details = [f"{names[kind]} {error:.2g} of {budget[kind]:.2g} allowed" for kind, error in found.items()]
        passed = all(error <= budget[kind] for kind, error in found.items())
        return {"check": name, "passed": passed, "detail": ", ".join(details)}


def by_position(tensor: np.ndarray) -> np.ndarray:
    """[B,H,S,E] -> [B,S,H,E]; encoder states [B,S,D] stay unchanged."""
    return tensor.swapaxes(1, 2) if tensor.ndim == 4 else tensor


def decode_samples(model: ModelEngines, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A row for every recorded source.

    It passes if its output is the recorded one, or diverges at a tie: at a token whose logit in the reference is nearly
    equal to the best. Tokens after a tie are not compared.
    """
    decode = check_decode(model.package)
    samples = model.package["decodes"]
    outputs = decoded(model, [sample["source"] for sample in samples], longest=decode["sample_length"])
    rows = []
    for sample, output in zip(samples, outputs, strict=True):
        passed, detail = compared(sample, output, decode["allowed_margin"])
        if sample["text"] is not None and tokenizer.encode(sample["text"], None) != sample["source"]:
            passed, detail = False, "the tokenizer makes other ids of the text than were recorded"
        rows.append(
            {
                "source": sample["text"] or " ".join(map(str, sample["source"])),
                "output": tokenizer.decode(output),
                "expected": tokenizer.decode(sample["tokens"]),
                "tokens": output,
                "passed": passed,
                "detail": detail,
            }
        )
    return rows


def compared(sample: Any, output: Sequence[int], margin: float) -> tuple[bool, str]:
    expected = sample["tokens"]
    if list(output) == expected:
        return True, "the same tokens"
    place = next((i for i, (a, b) in enumerate(zip(output, expected, strict=False)) if a != b), None)
    if place is None:
        return False, f"{len(output)} tokens, expected {len(expected)}"
    logits = dict(zip(*sample["best"][place], strict=True))  # token -> the reference's logit
    gap = logits[expected[place]] - logits.get(output[place], float("-inf"))
    if gap <= margin:
        return True, f"a tie at token {place + 1}: the reference has them {gap:.2g} apart"
    return False, f"token {place + 1} is {output[place]}, expected {expected[place]}"


if __name__ == "__main__":
    sys.exit(main())
