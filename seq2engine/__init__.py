"""Encoder-decoder Transformers from PyTorch to ONNX and TensorRT, with the same outputs, faster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers read; the same names as below
    from seq2engine.benchmarks.cases import Case as Case
    from seq2engine.benchmarks.comparison import Comparison as Comparison
    from seq2engine.benchmarks.comparison import Difference as Difference
    from seq2engine.benchmarks.comparison import compare_results as compare_results
    from seq2engine.benchmarks.options import BenchOptions as BenchOptions
    from seq2engine.benchmarks.result import BenchResult as BenchResult
    from seq2engine.benchmarks.result_files import result_from_path as result_from_path
    from seq2engine.benchmarks.runner import bench_bundle as bench_bundle
    from seq2engine.common.progress import Progress as Progress
    from seq2engine.errors import Seq2EngineError as Seq2EngineError
    from seq2engine.export.artifact.build_flags import BuildFlags as BuildFlags
    from seq2engine.export.artifact.bundle import Bundle as Bundle
    from seq2engine.export.artifact.bundle import GraphEntry as GraphEntry
    from seq2engine.export.artifact.bundle import Manifest as Manifest
    from seq2engine.export.artifact.bundle import open_bundle as open_bundle
    from seq2engine.export.artifact.passport import EngineEntry as EngineEntry
    from seq2engine.export.artifact.passport import Passport as Passport
    from seq2engine.export.artifact.passport import Reduction as Reduction
    from seq2engine.export.artifact.profiles import Range as Range
    from seq2engine.export.artifact.profiles import ShapeRanges as ShapeRanges
    from seq2engine.export.artifact.profiles import Workload as Workload
    from seq2engine.export.contract import GraphSpec as GraphSpec
    from seq2engine.export.engines.build_options import BuildOptions as BuildOptions
    from seq2engine.export.engines.foreign_step import ForeignStep as ForeignStep
    from seq2engine.export.engines.instances import InstancePlan as InstancePlan
    from seq2engine.export.engines.plan import PlannedProfile as PlannedProfile
    from seq2engine.export.engines.plan import ShapePlan as ShapePlan
    from seq2engine.export.engines.plan import plan_from_lengths as plan_from_lengths
    from seq2engine.export.engines.refit import refit_engines as refit_engines
    from seq2engine.export.engines.to_engine import engines_from_onnx as engines_from_onnx
    from seq2engine.exporting import add_precisions as add_precisions
    from seq2engine.exporting import export_checkpoint as export_checkpoint
    from seq2engine.exporting import onnx_from_model as onnx_from_model
    from seq2engine.inspection.describe import bundle_values as bundle_values
    from seq2engine.model.checkpoint import load_checkpoint as load_checkpoint
    from seq2engine.model.checkpoint import random_model as random_model
    from seq2engine.model.checkpoint import save_checkpoint as save_checkpoint
    from seq2engine.model.config import ModelConfig as ModelConfig
    from seq2engine.model.importers.detect import ImportResult as ImportResult
    from seq2engine.model.importers.detect import import_checkpoint as import_checkpoint
    from seq2engine.model.tokenizers.base import Coder as Coder
    from seq2engine.model.tokenizers.base import Tokenizer as Tokenizer
    from seq2engine.model.training.loop import TrainOptions as TrainOptions
    from seq2engine.model.training.text import TextOptions as TextOptions
    from seq2engine.model.training.text import Trained as Trained
    from seq2engine.model.training.text import train_from_text as train_from_text
    from seq2engine.model.transformer import Transformer as Transformer
    from seq2engine.packaging.package import PackageOptions as PackageOptions
    from seq2engine.packaging.package import PackageResult as PackageResult
    from seq2engine.packaging.package import package_from_bundle as package_from_bundle
    from seq2engine.packaging.push import PushOptions as PushOptions
    from seq2engine.packaging.push import PushResult as PushResult
    from seq2engine.packaging.push import push_bundle as push_bundle
    from seq2engine.runtime.attention.view import AttentionView as AttentionView
    from seq2engine.runtime.attention.view import LayerCheck as LayerCheck
    from seq2engine.runtime.generate import generate as generate
    from seq2engine.runtime.images.pixels import ImageInput as ImageInput
    from seq2engine.runtime.images.reader import Reading as Reading
    from seq2engine.runtime.model_options import SearchFields as SearchFields
    from seq2engine.runtime.model_options import options_from_session as options_from_session
    from seq2engine.runtime.opening import open_session as open_session
    from seq2engine.runtime.parity.levels.baseline import Against as Against
    from seq2engine.runtime.parity.levels.result import ParityResult as ParityResult
    from seq2engine.runtime.parity.options import ParityOptions as ParityOptions
    from seq2engine.runtime.parity.run import parities_of as parities_of
    from seq2engine.runtime.parity.run import parity_of as parity_of
    from seq2engine.runtime.quality.metrics import References as References
    from seq2engine.runtime.search.ahead.beam_plan import BeamPlan as BeamPlan
    from seq2engine.runtime.search.ahead.beam_plan import BeamRows as BeamRows
    from seq2engine.runtime.search.ahead.beam_plan import BeamsAhead as BeamsAhead
    from seq2engine.runtime.search.ahead.greedy_plan import ChosenTokens as ChosenTokens
    from seq2engine.runtime.search.ahead.greedy_plan import GreedyPlan as GreedyPlan
    from seq2engine.runtime.search.constraints.timestamps import Timestamps as Timestamps
    from seq2engine.runtime.search.constraints.trie import Trie as Trie
    from seq2engine.runtime.search.constraints.trie import trie_from_sequences as trie_from_sequences
    from seq2engine.runtime.search.option_fields import OptionFields as OptionFields
    from seq2engine.runtime.search.options import SearchOptions as SearchOptions
    from seq2engine.runtime.search.step import Emitted as Emitted
    from seq2engine.runtime.search.step import Hypothesis as Hypothesis
    from seq2engine.runtime.search.step_output import StepOutput as StepOutput
    from seq2engine.runtime.serving.scheduler import Scheduler as Scheduler
    from seq2engine.runtime.serving.tickets import Request as Request
    from seq2engine.runtime.serving.tickets import Ticket as Ticket
    from seq2engine.runtime.session import Limits as Limits
    from seq2engine.runtime.session import Session as Session
    from seq2engine.runtime.session import State as State
    from seq2engine.runtime.session import StepForm as StepForm
    from seq2engine.runtime.speech.audio import AudioInput as AudioInput
    from seq2engine.runtime.speech.options import TranscribeFields as TranscribeFields
    from seq2engine.runtime.speech.options import TranscribeOptions as TranscribeOptions
    from seq2engine.runtime.speech.transcript import Segment as Segment
    from seq2engine.runtime.speech.transcript import Transcript as Transcript
    from seq2engine.runtime.speech.transcript import Word as Word
    from seq2engine.runtime.text.continuous_batching import translate_many as translate_many
    from seq2engine.runtime.text.lines import Line as Line
    from seq2engine.runtime.text.scoring import ScoredLine as ScoredLine
    from seq2engine.runtime.text.scoring import TargetScore as TargetScore
    from seq2engine.runtime.text.scoring import score_targets as score_targets
    from seq2engine.runtime.text.translate import Output as Output
    from seq2engine.runtime.text.translate import Translated as Translated
    from seq2engine.runtime.translator import Translator as Translator
    from seq2engine.runtime.translator import load as load
    from seq2engine.triton.repository import TritonOptions as TritonOptions
    from seq2engine.triton.repository import WrittenModels as WrittenModels
    from seq2engine.triton.repository import repository_from_bundle as repository_from_bundle

__version__ = "0.1.0"

# Public names and where they live. Nothing heavy is imported until one of them is used.
PUBLIC = {
    # text in, text out
    "load": "runtime.translator",
    "Translator": "runtime.translator",
    "Translated": "runtime.text.translate",
    "Output": "runtime.text.translate",
    "Line": "runtime.text.lines",
    "TargetScore": "runtime.text.scoring",
    "ScoredLine": "runtime.text.scoring",
    "AttentionView": "runtime.attention.view",
    "LayerCheck": "runtime.attention.view",
    "Coder": "model.tokenizers.base",
    "Tokenizer": "model.tokenizers.base",
    # images in, text out
    "ImageInput": "runtime.images.pixels",
    "Reading": "runtime.images.reader",
    # audio in, text out
    "AudioInput": "runtime.speech.audio",
    "Transcript": "runtime.speech.transcript",
    "Segment": "runtime.speech.transcript",
    "Word": "runtime.speech.transcript",
    "TranscribeOptions": "runtime.speech.options",
    "TranscribeFields": "runtime.speech.options",
    # token ids in, token ids out
    "open_session": "runtime.opening",
    "Session": "runtime.session",
    "Limits": "runtime.session",
    "State": "runtime.session",
    "StepForm": "runtime.session",
    "StepOutput": "runtime.search.step_output",
    "BeamPlan": "runtime.search.ahead.beam_plan",
    "BeamRows": "runtime.search.ahead.beam_plan",
    "BeamsAhead": "runtime.search.ahead.beam_plan",
    "ChosenTokens": "runtime.search.ahead.greedy_plan",
    "GreedyPlan": "runtime.search.ahead.greedy_plan",
    "Workload": "export.artifact.profiles",
    "generate": "runtime.generate",
    "translate_many": "runtime.text.continuous_batching",
    "score_targets": "runtime.text.scoring",
    "Hypothesis": "runtime.search.step",
    "Emitted": "runtime.search.step",
    # many clients, one running batch
    "Scheduler": "runtime.serving.scheduler",
    "Request": "runtime.serving.tickets",
    "Ticket": "runtime.serving.tickets",
    # how to decode
    "SearchOptions": "runtime.search.options",
    "SearchFields": "runtime.model_options",
    "OptionFields": "runtime.search.option_fields",
    "options_from_session": "runtime.model_options",
    "Timestamps": "runtime.search.constraints.timestamps",
    "Trie": "runtime.search.constraints.trie",
    "trie_from_sequences": "runtime.search.constraints.trie",
    # models and checkpoints
    "ModelConfig": "model.config",
    "Transformer": "model.transformer",
    "random_model": "model.checkpoint",
    "load_checkpoint": "model.checkpoint",
    "save_checkpoint": "model.checkpoint",
    "import_checkpoint": "model.importers.detect",
    "ImportResult": "model.importers.detect",
    "train_from_text": "model.training.text",
    "TextOptions": "model.training.text",
    "Trained": "model.training.text",
    "TrainOptions": "model.training.loop",
    # bundles and engines
    "export_checkpoint": "exporting",
    "onnx_from_model": "exporting",
    "add_precisions": "exporting",
    "open_bundle": "export.artifact.bundle",
    "Bundle": "export.artifact.bundle",
    "Manifest": "export.artifact.bundle",
    "GraphEntry": "export.artifact.bundle",
    "GraphSpec": "export.contract",
    "engines_from_onnx": "export.engines.to_engine",
    "refit_engines": "export.engines.refit",
    "BuildOptions": "export.engines.build_options",
    "ShapeRanges": "export.artifact.profiles",
    "Range": "export.artifact.profiles",
    "BuildFlags": "export.artifact.build_flags",
    "Passport": "export.artifact.passport",
    "EngineEntry": "export.artifact.passport",
    "Reduction": "export.artifact.passport",
    "plan_from_lengths": "export.engines.plan",
    "ShapePlan": "export.engines.plan",
    "PlannedProfile": "export.engines.plan",
    "package_from_bundle": "packaging.package",
    "PackageOptions": "packaging.package",
    "PackageResult": "packaging.package",
    "bundle_values": "inspection.describe",
    "ForeignStep": "export.engines.foreign_step",
    "repository_from_bundle": "triton.repository",
    "TritonOptions": "triton.repository",
    "WrittenModels": "triton.repository",
    "InstancePlan": "export.engines.instances",
    "push_bundle": "packaging.push",
    "PushOptions": "packaging.push",
    "PushResult": "packaging.push",
    # parity and benchmark
    "parity_of": "runtime.parity.run",
    "parities_of": "runtime.parity.run",
    "ParityOptions": "runtime.parity.options",
    "ParityResult": "runtime.parity.levels.result",
    "Against": "runtime.parity.levels.baseline",
    "References": "runtime.quality.metrics",
    "bench_bundle": "benchmarks.runner",
    "BenchOptions": "benchmarks.options",
    "BenchResult": "benchmarks.result",
    "Case": "benchmarks.cases",
    "compare_results": "benchmarks.comparison",
    "Comparison": "benchmarks.comparison",
    "Difference": "benchmarks.comparison",
    "result_from_path": "benchmarks.result_files",
    # everywhere
    "Progress": "common.progress",
    "Seq2EngineError": "errors",
}
__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'seq2engine' has no attribute {name!r}")
    from seq2engine.errors import missing_package

    try:
        return getattr(importlib.import_module(f"seq2engine.{PUBLIC[name]}"), name)
    except ModuleNotFoundError as error:
        if missing := missing_package(error, f"seq2engine.{name}"):
            raise missing from error
        raise
