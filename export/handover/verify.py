"""Runs this package's engines on recorded inputs and says, graph by graph and step by step, whether they are right.

    python verify.py            needs numpy and `tensorrt` or `tensorrt_rtx`, whichever built the engines

What is right was recorded from the model in fp64. A tensor passes if its median and its worst error are no more than
so many times the error that PyTorch makes at the same precision on the same inputs: the numbers are in package.json.
Exit code 0: all passed. 1: something failed, or could not be run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from cuda_memory import Cuda, CudaError  # noqa: E402  (these lie beside this file)
from trt_engine import Engine, EngineFailed  # noqa: E402

STORED = {"bfloat16": "uint16"}  # numpy has no such type: its bits


class VerifyFailed(Exception):
    """Why nothing can be said, in one line."""


def main(argv: Sequence[str] | None = None, cudart: Any = None) -> int:
    parser = argparse.ArgumentParser(description="Verifies the engines of this package.")
    parser.add_argument("--flavour", help="which engines, where there are several (see the folder engines)")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    args = parser.parse_args(argv)
    try:
        package = read_json(HERE / "package.json")
        folder, built = chosen_engines(package, args.flavour)
        check_files(package, folder, built)
        trt = load(built)
        with Cuda(cudart) as cuda:
            where = f"{trt.__name__} {trt.__version__} on {cuda.capability}"
            verification = Verification(package, cuda)
            try:
                verification.open(trt, folder, built)
                checks = verification.run()
            finally:
                verification.close()
    except (VerifyFailed, EngineFailed, CudaError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = [check for check in checks if not check["passed"]]
    print(f"{'FAIL' if failed else 'PASS'}: {where}: {len(checks) - len(failed)} of {len(checks)} checks passed")
    if args.json is not None:
        args.json.write_text(json.dumps({"where": where, "passed": not failed, "checks": checks}, indent=1) + "\n")
    return 1 if failed else 0


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise VerifyFailed(f"{path} cannot be read ({error.strerror}); copy the package again") from error
    except ValueError as error:
        raise VerifyFailed(f"{path} is damaged ({error}); copy the package again") from error


def chosen_engines(package: Any, flavour: str | None) -> tuple[Path, Any]:
    there = sorted(path.parent.name for path in (HERE / "engines").glob("*/engines.json"))
    if not there or (flavour is not None and flavour not in there):
        wanted = f" --flavour {flavour}" if flavour else ""
        raise VerifyFailed(
            f"no {flavour or ''} engines here; build them with: python build.py{wanted}".replace("  ", " ")
        )
    if flavour is None and len(there) > 1:
        raise VerifyFailed(f"engines of {' and '.join(there)}; choose with: python verify.py --flavour {there[0]}")
    folder = HERE / "engines" / (flavour or there[0])
    built = read_json(folder / "engines.json")
    if built["made_from"] != package["fingerprint"]:
        raise VerifyFailed(f"{folder} was built from other graphs than these; {rebuild(built)}")
    return folder, built


def rebuild(built: Any) -> str:
    target = " ".join(["", "--target", *built["targets"]]) if built["targets"] else ""
    return f"rebuild with: python build.py --flavour {built['flavour']}{target}"


def check_files(package: Any, folder: Path, built: Any) -> None:
    """Whole files before anything is run on them."""
    samples = {HERE / sample["file"]: (sample["sha256"], "copy the package again") for sample in package["samples"]}
    engines = {folder / entry["file"]: (entry["sha256"], rebuild(built)) for entry in built["engines"].values()}
    for path, (expected, mend) in {**samples, **engines}.items():
        if not path.is_file():
            raise VerifyFailed(f"{path} is missing; {mend}")
        if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise VerifyFailed(f"{path} is damaged (its hash differs); {mend}")


def load(built: Any) -> Any:
    name = built["flavour"]
    try:
        trt = importlib.import_module(name)
    except ImportError as error:
        raise VerifyFailed(f"{name} cannot be imported ({error}); install it with: pip install {name}") from error
    if trt.__version__ != built["version"]:
        built_with = f"the engines were built with {name} {built['version']}"
        raise VerifyFailed(f"{built_with}, installed is {trt.__version__}; {rebuild(built)}")
    return trt


class Verification:
    """Both engines over all recorded batches; errors are gathered tensor by tensor and judged at the end."""

    def __init__(self, package: Any, cuda: Cuda):
        self.package, self.cuda = package, cuda
        self.graphs = package["graphs"]
        self.engines: dict[str, Engine] = {}
        self.dtypes = {
            t["name"]: t["dtype"] for graph in self.graphs.values() for t in graph["inputs"] + graph["outputs"]
        }
        self.errors: dict[str, list[np.ndarray]] = {name: [] for name in package["budgets"]}
        self.said: list[bool] = []
        self.ties = 0

    def open(self, trt: Any, folder: Path, built: Any) -> None:
        for name, graph in self.graphs.items():
            path = folder / built["engines"][name]["file"]
            self.engines[name] = Engine(trt, self.cuda, path, graph, rebuild(built))

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def run(self) -> list[dict[str, Any]]:
        for sample in self.package["samples"]:
            with np.load(HERE / sample["file"]) as arrays:
                self.run_batch({name: arrays[name] for name in arrays.files})
            self.cuda.release()
        checks = [self.judged(name, budget) for name, budget in self.package["budgets"].items()]
        right = int(sum(self.said))
        detail = f"{right} of {len(self.said)} sources say what the reference says, {self.ties} ties"
        checks.append({"check": "tokens", "passed": right == len(self.said), "detail": detail})
        for check in checks:
            print(f"{'PASS' if check['passed'] else 'FAIL'}  {check['check']:<36}  {check['detail']}", flush=True)
        return checks

    def run_batch(self, batch: dict[str, np.ndarray]) -> None:
        state = self.encoded(batch)
        batch_size, beams = batch["tokens"].shape[1:]
        going, right = np.ones(batch_size, dtype=bool), np.ones(batch_size, dtype=bool)
        cache = Cache(self, batch_size, beams, len(batch["tokens"]))
        for step in range(len(batch["tokens"])):
            logits = self.stepped(batch, state, cache, step)
            exact = batch["logits"][step]
            self.gather(f"decoder_step logits, step {step}", logits[:, :, batch["columns"]], exact)
            agreed = self.agreed(batch, step, logits)
            right &= agreed.all(axis=1) | ~going
            going &= batch["top_ids"][step, :, 0, 0] != self.package["end_id"]
        written = beams * len(batch["tokens"])
        for name in cache.names:
            self.gather(f"decoder_step {name}", cache.array(name)[:, :, :written], batch[name])
        self.said += list(right)

    def encoded(self, batch: dict[str, np.ndarray]) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Runs the encoder, checks it; address and shape of what the decoder reads of it."""
        graph = self.graphs["encoder"]
        inputs = {t["name"]: batch[t["name"]] for t in graph["inputs"]}
        sizes = dict(zip("BS", inputs["source_ids"].shape, strict=True))
        places = {name: (self.uploaded(array), array.shape) for name, array in inputs.items()}
        for tensor in graph["outputs"]:
            shape = shape_of(tensor, sizes)
            places[tensor["name"]] = (self.cuda.allocate(self.nbytes(tensor["name"], shape)), shape)
        addresses = {name: address for name, (address, _) in places.items()}
        self.engines["encoder"].run({name: array.shape for name, array in inputs.items()}, addresses)
        self.cuda.wait()
        for tensor in graph["outputs"]:
            found, exact = self.downloaded(tensor["name"], *places[tensor["name"]]), batch[tensor["name"]]
            real = inputs["source_mask"]
            if found.ndim == 4:  # [B,H,S,E] -> [B,S,H,E]
                found, exact = found.swapaxes(1, 2), exact.swapaxes(1, 2)
            self.gather(f"encoder {tensor['name']}", found[real], exact[real])
        return places

    def stepped(self, batch: dict[str, np.ndarray], state: Mapping[str, Any], cache: Cache, step: int) -> np.ndarray:
        """One decoder step -> logits [B,K,V]."""
        graph = self.graphs["decoder_step"]
        batch_size, beams = batch["tokens"].shape[1:]
        attended = cache.attended(step)
        given = {name: batch[name][step] for name in ("tokens", "position", "write_index")}
        given["self_mask"] = np.ascontiguousarray(batch["self_mask"][step][:, :, :attended])
        shapes, addresses = {}, {}
        for tensor in graph["inputs"]:
            name = tensor["name"]
            if name in given:
                shapes[name], addresses[name] = given[name].shape, self.uploaded(given[name])
            elif name in state:
                addresses[name], shapes[name] = state[name]
            else:
                addresses[name], shapes[name] = cache.read[name], cache.shape(step)
        (spec,) = (t for t in graph["outputs"] if t["name"] == "logits")
        shape = shape_of(spec, {"B": batch_size, "K": beams})
        addresses["logits"] = self.cuda.allocate(self.nbytes("logits", shape))
        addresses |= {f"new_{name}": cache.written[name] for name in cache.names}
        self.engines["decoder_step"].run(shapes, addresses)
        self.cuda.wait()
        cache.swap()
        return self.downloaded("logits", addresses["logits"], shape)

    def agreed(self, batch: dict[str, np.ndarray], step: int, logits: np.ndarray) -> np.ndarray:
        """Beams [B,K] whose best token is the reference's, or one that rounding could turn it into."""
        ids, values = batch["top_ids"][step], batch["top_values"][step]  # [B,K,N], best first
        found = np.nan_to_num(logits, nan=-np.inf).argmax(axis=-1)
        among = found[:, :, None] == ids
        place = np.where(among.any(axis=-1), among.argmax(axis=-1), ids.shape[-1] - 1)
        margin = values[:, :, 0] - np.take_along_axis(values, place[:, :, None], axis=-1)[:, :, 0]
        equal, close = found == ids[:, :, 0], margin <= batch["allowed_margin"][step]
        self.ties += int((close & ~equal)[:, 0].sum())
        return (equal | close) & np.isfinite(logits).all(axis=-1)

    def gather(self, name: str, found: np.ndarray, exact: np.ndarray) -> None:
        errors = np.abs(found.astype(np.float64) - exact)
        errors[~np.isfinite(errors)] = np.inf  # NaN is as wrong as can be
        self.errors[name].append(errors.ravel())

    def judged(self, name: str, budget: Mapping[str, float]) -> dict[str, Any]:
        errors = np.concatenate(self.errors[name])
        median, worst = float(np.median(errors)), float(errors.max())
        passed = median <= budget["median"] and worst <= budget["worst"]
        detail = f"median {median:.2g} of {budget['median']:.2g} allowed, worst {worst:.2g} of {budget['worst']:.2g}"
        return {"check": name, "passed": passed, "detail": detail}

    def uploaded(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.cuda.allocate(array.nbytes)
        self.cuda.upload(array, address)
        return address

    def downloaded(self, name: str, address: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = self.dtypes[name]
        array = np.empty(shape, dtype=STORED.get(dtype, dtype))
        self.cuda.download(address, array)
        return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array

    def nbytes(self, name: str, shape: tuple[int, ...]) -> int:
        dtype = self.dtypes[name]
        return math.prod(shape) * np.dtype(STORED.get(dtype, dtype)).itemsize


class Cache:
    """The decoder's cache: one buffer a tensor that is updated in place, or two that change places in every step."""

    def __init__(self, verification: Verification, batch: int, beams: int, steps: int):
        self.verification, self.batch, self.beams = verification, batch, beams
        package = verification.package
        self.static = package["cache_form"] == "static"
        outputs = {t["name"] for t in package["graphs"]["decoder_step"]["outputs"]}
        tensors = [t for t in package["graphs"]["decoder_step"]["inputs"] if f"new_{t['name']}" in outputs]
        self.names = [t["name"] for t in tensors]
        self.axes = tensors[0]
        self.length = package["slots"] if self.static else beams * steps
        self.steps = 0
        self.read = {name: self.buffer(name) for name in self.names}
        self.written = self.read if self.static else {name: self.buffer(name) for name in self.names}

    def buffer(self, name: str) -> int:
        cuda = self.verification.cuda
        size = self.verification.nbytes(name, self.shaped(self.length))
        address = cuda.allocate(size)
        cuda.clear(address, size)
        return address

    def shaped(self, length: int) -> tuple[int, ...]:
        return shape_of(self.axes, {"B": self.batch, "L": length})

    def shape(self, step: int) -> tuple[int, ...]:
        return self.shaped(self.length if self.static else self.beams * step)

    def attended(self, step: int) -> int:
        return self.length if self.static else self.beams * (step + 1)

    def swap(self) -> None:
        self.steps += 1
        self.read, self.written = self.written, self.read

    def array(self, name: str) -> np.ndarray:
        return self.verification.downloaded(name, self.read[name], self.shape(self.steps))


def shape_of(tensor: Any, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor["axes"])


if __name__ == "__main__":
    sys.exit(main())
