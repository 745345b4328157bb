"""The stages of `seq2engine demo`: a trained model from weights to text, on this machine, without a GPU.

The shipped grapheme-to-phoneme model is exported, checked and timed, with the error rates of each precision; and
TensorRT engines of the larger `base` preset show the kernel launches of a GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.options import BenchOptions
from seq2engine.benchmarks.report.page import bench_html, bench_table
from seq2engine.benchmarks.runner import bench_bundle
from seq2engine.common.progress import Progress
from seq2engine.common.reports import report_files
from seq2engine.common.tables import text_table
from seq2engine.export.artifact.bundle import Bundle
from seq2engine.export.artifact.passport import Passport
from seq2engine.export.artifact.profiles import Range
from seq2engine.export.engines.to_engine import default_ranges, engines_from_onnx
from seq2engine.exporting import onnx_from_model
from seq2engine.model.checkpoint import load_checkpoint, random_model
from seq2engine.model.shipped import TEST_SPLIT, shipped_checkpoint
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.report.page import parity_html, report_name
from seq2engine.runtime.parity.run import parity_of
from seq2engine.runtime.quality.metrics import References, references_from_file
from seq2engine.runtime.translator import load

TARGET = "sm89"
BEAM = 4
WORDS = ("transformer", "encoder", "attention", "pharaoh", "knight", "quay")
TEST_WORDS = 400  # of the test split: enough to show the cost of a precision, few enough for a demo
THREADS = 1  # a model this small is slower with a second thread


def demo(out: Path, progress: Progress) -> str:
    """Runs every stage into `out`, replacing an earlier demo, and returns the summary."""
    shipped = shipped_checkpoint("g2p")
    references = references_from_file(shipped / TEST_SPLIT, TEST_WORDS)
    bundle = onnx_from_model(
        load_checkpoint(shipped),
        out / "g2p",
        ("fp32", "fp16"),
        force=True,
        progress=progress,
        companions=shipped,
    )
    base = onnx_from_model(random_model("base"), out / "base", ("fp32", "fp16"), force=True, progress=progress)
    engines = [
        (name, engine_stage(made, precision, beam, progress))
        for name, made in (("g2p", bundle), ("base", base))
        for precision in made.precisions
        for beam in (1, BEAM)
    ]
    verdicts = [parity_stage(bundle, precision, references, progress) for precision in bundle.precisions]
    files = report_files(bundle.root, "bench", "demo")
    bench = bench_bundle(
        bundle,
        BenchOptions(
            precisions=bundle.precisions,
            cases=(Case("1x1x9x9", 1, 1, 9, 9), Case("8x4x9x9", 8, BEAM, 9, 9)),
            rounds=10,
            threads=THREADS,
            references=references,
            quick=True,
        ),
        progress,
    )
    files.write(bench_html(bench), bench.to_json())
    made = [
        ("checkpoint", shipped),
        ("ONNX graphs", bundle.root / "onnx"),
        ("TensorRT engines", base.root / "engines"),
        ("parity report", verdicts[0][1]),
        ("benchmark report", files.page),
    ]
    return "\n\n".join(
        [
            launch_table(engines),
            text_table(("spelling", f"phonemes, by seq2engine run {bundle.root}"), pronunciations(bundle)),
            "\n".join(verdict for verdict, _ in verdicts),
            bench_table(bench),
            text_table(("made", "where"), made),
        ]
    )


def engine_stage(bundle: Bundle, precision: str, beam: int, progress: Progress) -> Passport:
    ranges = dataclasses.replace(default_ranges(bundle.config), beam=Range(beam, beam, beam))
    return engines_from_onnx(bundle, [TARGET], ranges, precision, progress=progress)


def parity_stage(bundle: Bundle, precision: str, references: References, progress: Progress) -> tuple[str, Path]:
    report = report_files(bundle.root, "parity", report_name("onnxruntime", None, precision))
    options = ParityOptions(beam=BEAM, threads=THREADS, references=references)
    result = parity_of(bundle, precision=precision, options=options, progress=progress)
    report.write(parity_html(result), result.to_json())
    rates = ", ".join(
        f"{quality.search} PER {quality.marked.tokens:.1%} WER {quality.marked.lines:.1%}"
        for quality in result.quality[result.candidate]
    )
    return "\n".join(filter(None, (f"{result.verdict_line}; {rates}", result.cost_line))), report.page


def launch_table(engines: list[tuple[str, Passport]]) -> str:
    """Kernel launches of the decoder steps, read from the engines; they were built here, without a GPU."""
    rows = [
        (
            f"{name} decoder step, {passport.precision}, beam {passport.ranges.beam.max}",
            passport.engines["decoder_step"].launches,
            f"{passport.engines['decoder_step'].fused_attentions} of {passport.engines['decoder_step'].attentions}",
        )
        for name, passport in engines
    ]
    return text_table((f"TensorRT engine for {TARGET}", "launches", "fused attentions"), rows)


def pronunciations(bundle: Bundle) -> list[tuple[str, str]]:
    with load(bundle, threads=THREADS) as model:
        return list(zip(WORDS, model.translate(WORDS, beam=BEAM), strict=True))
