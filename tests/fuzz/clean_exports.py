"""Clean exports of random models in every precision: each must pass parity. What does not is a false alarm, or a bug.

    make exports                              # 500, a new seed, which is printed
    make exports EXPORTS="--exports 50 --seed 3"
    make exports EXPORTS="--seed 3 --only 17" # one again, with its whole reason

A model is decided by seed and number alone: norms, positions, activation, tying, biases, T5's and Whisper's options.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random, SystemRandom

from seq2engine.export.contract import PRECISIONS
from seq2engine.export.ort_forms import interface
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import CHOICES, ModelConfig
from seq2engine.runtime.ort.session import EVEN
from seq2engine.runtime.parity.levels.graphs import graphs_of
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.parity.weights.level import weights_of

EXPORTS = 500
LARGE = interface.WORTH_IT
T5 = {"norm": "pre", "norm_kind": "rms", "positions": "relative", "biases": False, "scale_attention": False}
WHISPER = {"front_end": "mel", "norm": "pre", "positions": "learned", "activation": "gelu", "scale_embeddings": False}


def main() -> int:
    args = arguments()
    seed = SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    passed: Counter[str] = Counter()
    alarms: list[str] = []
    numbers = args.only or range(args.first, args.first + args.exports)
    for done, number in enumerate(numbers, 1):
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="export-") as folder:
            try:
                precision, message = verdict(seed, number, Path(folder))
            except Exception:
                precision, message = "error", traceback.format_exc()
        if message:
            alarms.append(f"{number} {precision}: {message}")
            print(f"ALARM {alarms[-1]}", flush=True)
        passed[precision] += not message
        if args.only or done % 25 == 0:
            print(f"{done} exports, {len(alarms)} alarms, last one {time.monotonic() - started:.1f} s", flush=True)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(passed.items()))
    print(f"seed {seed}: {len(numbers)} exports, {len(alarms)} alarms; passed: {counts}")
    return 1 if alarms else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--exports", type=int, default=EXPORTS)
    parser.add_argument("--first", type=int, default=0, help="number of the first export")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", type=int, nargs="+", help="only these exports")
    return parser.parse_args()


def verdict(seed: int, number: int, folder: Path) -> tuple[str, str]:
    """Exports a random model; returns its precision and what parity has against it ('': nothing)."""
    rng = Random(f"{seed} {number}")
    precision = rng.choice(tuple(PRECISIONS))
    config = random_config(rng)
    while precision == "int4" and any(size % 16 for size in (config.d_model, config.d_ff, config.attention_width)):
        config = random_config(rng)  # int4 has no scales for other widths
    form = rng.choice(("static", "static", "growing"))
    bundle = onnx_from_model(random_model(config, rng.randrange(10**6)), folder / "bundle", (precision,), form)
    padded = precision != "bf16" and form == "static" and config.max_source >= EVEN
    options = ParityOptions(
        count=3,
        seed=rng.randrange(10**6),
        beam=rng.choice((2, 3, 4)),
        max_length=rng.randint(4, config.max_target),
        batch=4,
        threads=1,
        deterministic=padded and rng.random() < 0.2,
    )
    screened = config.target_vocab > interface.MOST and rng.random() < 0.5
    interface.WORTH_IT = 0 if screened else LARGE  # as of a large vocabulary
    if precision == "bf16":  # ONNX Runtime has no products of it: what is stored is accounted for, and PyTorch runs it
        levels = (*weights_of(bundle, precision), *graphs_of(bundle, precision))
        wrong = [str(level) for level in levels if not level]
        if wrong:
            return precision, f"{wrong[0]} {config}"
    backend = "torch" if precision == "bf16" else "onnxruntime"
    result = parity_of(bundle, backend, precision, options)
    return precision, "" if result else f"{result.reason} {changes(config)} {form} {options}"


def random_config(rng: Random) -> ModelConfig:
    heads = rng.choice((1, 2, 4))
    width = rng.choice((8, 16))
    vocab = rng.randint(12, 90)
    values: dict[str, object] = {name: rng.choice(CHOICES[name]) for name in ("norm", "norm_kind", "activation")}
    values |= {
        "positions": rng.choice(CHOICES["positions"]),
        "encoder_layers": rng.randint(1, 2),
        "decoder_layers": rng.randint(1, 2),
        "heads": heads,
        "d_model": heads * width,
        "d_ff": rng.choice((16, 40, 64)),
        "d_kv": rng.choice((0, 0, 4, 10)),
        "source_vocab": vocab,
        "target_vocab": vocab,
        "max_source": rng.randint(6, 12),
        "max_target": rng.randint(5, 10),
        "max_distance": rng.choice((2, 5, 128)),
        "norm_epsilon": rng.choice((1e-6, 1e-5, 1e-3)),
    }
    for name in ("distances_per_layer", "gated", "biases", "scale_attention", "tie_output", "scale_embeddings"):
        values[name] = rng.random() < 0.5
    for name in ("scale_output", "output_bias", "embedding_norm", "final_norm", "share_embeddings"):
        values[name] = rng.random() < 0.5
    if not values["share_embeddings"]:
        values["source_vocab"] = rng.randint(12, 90)
    family = rng.random()
    if family < 0.15:
        values |= T5
    elif family < 0.25:
        values |= WHISPER | {"source_vocab": 0, "share_embeddings": False, "mels": rng.choice((8, 20))}
    return ModelConfig(**values)  # type: ignore[arg-type]


def changes(config: ModelConfig) -> dict[str, object]:
    """The fields that are not as in the paper."""
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in dataclasses.asdict(config).items() if value != usual[name]}


if __name__ == "__main__":
    sys.exit(main())
