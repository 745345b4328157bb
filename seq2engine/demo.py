"""The whole story on small seeded models: export, build, decode, parity, benchmark. CPU only, about a minute."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.report import bench_html, bench_table
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.export.bundle import Bundle, write_text
from seq2engine.export.passport import Passport
from seq2engine.export.profiles import Range
from seq2engine.export.to_engine import default_ranges, engines_from_onnx
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model, save_checkpoint
from seq2engine.progress import Progress
from seq2engine.runtime.generate import generate
from seq2engine.runtime.parity import parity_of, random_sources
from seq2engine.runtime.parity_report import parity_html
from seq2engine.runtime.search import SearchOptions
from seq2engine.runtime.session import open_session
from seq2engine.tables import text_table

TARGET = "sm89"
BEAM = 4
THREADS = 1  # for a model this small a second thread costs more than it brings


def demo(out: Path, progress: Progress) -> str:
    """Runs every stage into `out` (replacing what an earlier demo left) and returns the closing summary."""
    tiny = random_model("tiny", seed=7)
    checkpoint = save_checkpoint(tiny, out / "checkpoint", force=True)
    bundle = onnx_from_model(tiny, out / "tiny", ("fp32", "fp16"), force=True, progress=progress)
    base = onnx_from_model(random_model("base"), out / "base", ("fp32", "fp16"), force=True, progress=progress)
    engines = [
        engines_from_onnx(
            base,
            [TARGET],
            dataclasses.replace(default_ranges(base.config), beam=Range(beam, beam, beam)),
            precision,
            progress=progress,
        )
        for precision in base.precisions
        for beam in (1, BEAM)
    ]
    verdicts = [parity_stage(bundle, precision, progress) for precision in bundle.precisions]
    bench = bench_bundle(
        bundle,
        backends=("torch", "onnxruntime"),
        precisions=("fp32",),
        cases=(Case("1x1x16x32", 1, 1, 16, 32), Case("8x4x16x32", 8, BEAM, 16, 32)),
        rounds=10,
        threads=THREADS,
        progress=progress,
    )
    write_text(bundle.root / "reports" / "bench.html", bench_html(bench))
    write_text(bundle.root / "reports" / "bench.json", bench.to_json())
    files = [
        ("checkpoint", checkpoint),
        ("ONNX graphs", bundle.root / "onnx"),
        ("TensorRT engines", base.root / "engines"),
        ("parity report", bundle.root / "reports" / "parity-onnxruntime-fp32.html"),
        ("benchmark report", bundle.root / "reports" / "bench.html"),
    ]
    return "\n\n".join(
        [
            launch_table(engines),
            "a decode (token ids): " + sample_decode(bundle),
            "\n".join(verdicts),
            bench_table(bench),
            text_table(("made", "where"), files),
        ]
    )


def parity_stage(bundle: Bundle, precision: str, progress: Progress) -> str:
    result = parity_of(bundle, precision=precision, count=64, threads=THREADS, progress=progress)
    report = bundle.root / "reports" / f"parity-onnxruntime-{precision}.html"
    write_text(report, parity_html(result))
    write_text(report.with_suffix(".json"), result.to_json())
    return f"parity {precision}: {'passed' if result else 'FAILED'}: {result.reason}"


def launch_table(engines: list[Passport]) -> str:
    """Kernel launches of the `base` decoder step, read from the engines; they were built here, without a GPU."""
    rows = [
        (
            f"base decoder step, {passport.precision}, beam {passport.ranges.beam.max}",
            passport.engines["decoder_step"].launches,
            f"{passport.engines['decoder_step'].fused_attentions} of {passport.engines['decoder_step'].attentions}",
        )
        for passport in engines
    ]
    return text_table((f"TensorRT engine for {TARGET}", "launches", "fused attentions"), rows)


def sample_decode(bundle: Bundle) -> str:
    source = random_sources(bundle.config, 8, seed=3)[-1]
    with open_session(bundle) as session:
        best = generate(session, [source], SearchOptions(max_length=16, beam=BEAM))[0][0]
    return f"{' '.join(map(str, source[:8]))} ... -> {' '.join(map(str, best.tokens))}"
