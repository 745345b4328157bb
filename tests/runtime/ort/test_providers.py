"""Execution providers of ONNX Runtime, as far as a machine without a GPU can tell: refusals, options, fallbacks."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest
from support.stand_in_engines import MODEL, SOURCES

from seq2engine.errors import SessionError
from seq2engine.export.artifact.bundle import open_bundle
from seq2engine.export.contract import TensorSpec
from seq2engine.export.device_graphs.gathers import gather_slots
from seq2engine.export.ort_form import FormedGraph
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import graphs
from seq2engine.runtime.ort.graphs import GraphKind, Placement, inference_session
from seq2engine.runtime.ort.providers import (
    CPU,
    NO_CPU,
    OF_SHAPES,
    PLUG_IN,
    PROVIDERS,
    RECORD,
    arguments_for,
    check_assignment,
    check_provider,
    nodes_on_cpu,
)
from seq2engine.runtime.ort.session import OrtSession, OrtSettings
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.torch_session import TorchSession

GRAPH = Path("run7/onnx/fp32/encoder.onnx")
STEP = GRAPH.with_name("decoder_step.onnx")
CUDA = "CUDAExecutionProvider"


def offering(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """An onnxruntime that claims to have these providers, as one for GPUs does on any machine."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [*names, CPU])


def test_the_cpu_is_the_default(bundles: dict[str, Path]) -> None:
    options = SearchOptions(max_length=6)
    with (
        open_session(bundles["static"], threads=1) as plain,
        open_session(bundles["static"], threads=1, provider="cpu") as named,
        TorchSession(MODEL) as torch_session,
    ):
        assert plain.backend == named.backend == "onnxruntime"
        expected = generate(torch_session, SOURCES, options)
        for session in (plain, named):
            assert [row[0].tokens for row in generate(session, SOURCES, options)] == [row[0].tokens for row in expected]


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "nv_tensorrt_rtx"])
def test_one_that_is_not_installed(provider: str, bundles: dict[str, Path], cli: Any) -> None:
    code, _, errors = cli("run", bundles["static"], "5 17", "--provider", provider)
    assert code == 1
    assert errors == (
        f"error: onnxruntime {ort.__version__} as installed has no provider {provider}; "
        f"install it with: {PROVIDERS[provider].install}\n"
    )


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_cpu_wheel_over_the_one_for_gpus(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`seq2engine[gpu]` installs both, and which library is left depends on the order."""
    wheels = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"}
    monkeypatch.setattr(importlib.metadata, "version", wheels.__getitem__)
    with pytest.raises(SessionError) as caught:
        check_provider(provider)
    assert str(caught.value) == (
        f"provider {provider} is not in this onnxruntime (CPU wheel 1.31.1 hides onnxruntime-gpu 1.31.0); run: "
        f"pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
        + (" tensorrt" if provider == "tensorrt" else "")
    )
    offering(monkeypatch, PROVIDERS[provider].name)  # the other order: nothing is hidden
    check_provider(provider)


def test_an_unknown_provider(bundles: dict[str, Path]) -> None:
    with pytest.raises(SessionError, match="unknown provider 'abacus', expected one of cpu, cuda, tensorrt, nv_tensor"):
        open_session(bundles["static"], provider="abacus")
    with pytest.raises(
        SessionError, match="a provider is an option of onnxruntime, not of torch; leave --provider out"
    ):
        open_session(bundles["static"], "torch", provider="cuda")


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_one_that_onnxruntime_leaves_out_without_an_exception(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real ONNX Runtime, asked for a provider that cannot be loaded: it falls back to the CPU."""
    offering(monkeypatch, CUDA)
    graph = copy_of_graphs(bundles, tmp_path)
    with pytest.raises(SessionError) as caught:
        open_session(graph, provider="cuda", threads=1)
    assert "provider cuda could not be loaded, and ONNX Runtime would run " in str(caught.value)
    assert str(caught.value).endswith("look at its log above for the reason, or use --provider cpu")


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_an_older_onnxruntime_must_not_fall_back(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offering(monkeypatch, CUDA)
    asked = "get_provider_graph_assignment_info"
    monkeypatch.delattr(next(c for c in ort.InferenceSession.__mro__ if asked in vars(c)), asked)
    with pytest.raises(SessionError, match=r"cannot load .*encoder.onnx: .* fallback to CPU EP has been explicitly"):
        open_session(copy_of_graphs(bundles, tmp_path), provider="cuda", threads=1)


def copy_of_graphs(bundles: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundles["static"], tmp_path / "run7"))


@pytest.mark.parametrize(
    ("provider", "precision", "after", "some"),
    [
        ("cuda", "fp32", [], {"use_tf32": "0"}),
        ("tensorrt", "fp16", [CUDA], {"trt_fp16_enable": "1", "trt_engine_cache_enable": "1"}),
        ("tensorrt", "fp32", [CUDA], {"trt_fp16_enable": "0"}),
        ("nv_tensorrt_rtx", "fp32", [], {"nv_runtime_cache_path": "{kept}"}),
    ],
)
def test_options(
    provider: str,
    precision: str,
    after: list[str],
    some: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offering(monkeypatch, PROVIDERS[provider].name, *after)
    options = ort.SessionOptions()
    (first, *rest) = arguments_for(provider, options, tmp_path / "encoder.onnx", precision)["providers"]
    name, chosen = first
    assert (name, rest) == (PROVIDERS[provider].name, after)
    expected = {key: value.replace("{kept}", str(tmp_path / f".{provider}")) for key, value in some.items()}
    assert expected.items() <= chosen.items()
    assert all(isinstance(value, str) for value in chosen.values())
    replayed = dict([arguments_for(provider, options, tmp_path / "encoder.onnx", precision, True)["providers"][0]])
    (key,) = replayed[name].keys() - chosen.keys()
    assert key.endswith(("enable_cuda_graph", "cuda_graph_enable"))
    assert options.get_session_config_entry(RECORD) == "1"
    with pytest.raises(RuntimeError):  # not both: shapes may be computed on the CPU
        options.get_session_config_entry(NO_CPU)


class Session(SimpleNamespace):
    """What an InferenceSession tells of itself."""

    def __init__(self, providers: list[str], parts: dict[str, list[str]]):
        super().__init__(fallback=True)
        self.providers, self.parts = providers, parts

    def disable_fallback(self) -> None:
        self.fallback = False

    def get_providers(self) -> list[str]:
        return self.providers

    def get_provider_graph_assignment_info(self) -> list[Any]:
        def nodes(types: list[str]) -> Any:
            return lambda: [SimpleNamespace(op_type=kind, name=f"decoder.0/{kind}") for kind in types]

        return [SimpleNamespace(ep_name=name, get_nodes=nodes(types)) for name, types in self.parts.items()]


def test_who_got_which_nodes() -> None:
    right = Session([CUDA, CPU], {CUDA: ["MatMul", "Softmax"], CPU: ["Shape", "Range"]})
    check_assignment(right, "cuda", GRAPH)
    assert not right.fallback, "nor is a failed run to be done again on the CPU"
    some = Session([CUDA, CPU], {CUDA: ["MatMul"], CPU: ["TensorScatter", "Shape", "Softmax"]})
    with pytest.raises(SessionError) as caught:
        check_assignment(some, "cuda", GRAPH)
    assert str(caught.value) == (
        f"provider cuda left a part of {GRAPH} to the CPU (decoder.0/TensorScatter: TensorScatter, "
        "decoder.0/Softmax: Softmax); use --provider cpu"
    )
    nothing = Session([CUDA, CPU], {CPU: ["Shape"]})
    with pytest.raises(SessionError, match=r"to the CPU \(all of it\)"):
        check_assignment(nothing, "cuda", GRAPH)
    check_assignment(Session([CPU], {CPU: ["MatMul"]}), "cpu", GRAPH)


def test_a_step_leaves_no_node_to_the_cpu_not_even_one_of_shapes() -> None:
    check_assignment(Session([CUDA, CPU], {CUDA: ["MatMul"]}), "cuda", STEP, strict=True)
    with pytest.raises(SessionError, match=r"to the CPU \(decoder.0/Shape: Shape, decoder.0/Cast: Cast\); use"):
        check_assignment(Session([CUDA, CPU], {CUDA: ["MatMul"], CPU: ["Shape", "Cast"]}), "cuda", STEP, strict=True)
    with pytest.raises(SessionError, match=r"Add, decoder.0/Add: Add and 3 more\); use --provider cpu"):
        check_assignment(Session([CUDA, CPU], {CUDA: ["MatMul"], CPU: ["Add"] * 11}), "cuda", STEP, strict=True)


def test_nodes_are_those_that_onnxruntime_tells_of() -> None:
    """The real one, on the CPU, which gets all of them."""
    options = ort.SessionOptions()
    options.add_session_config_entry(RECORD, "1")
    model, _ = gather_slots([TensorSpec("self_k.0", "float32", ("B", 2, "L", 4))])
    session = ort.InferenceSession(model.SerializeToString(), options, providers=[CPU])
    assert "self_k.0/slots: GatherND" in nodes_on_cpu(session, frozenset())
    assert "places/row: Unsqueeze" in nodes_on_cpu(session, frozenset())
    assert "places/row: Unsqueeze" not in nodes_on_cpu(session, OF_SHAPES)


@pytest.mark.parametrize("form", ["static", "growing"])
def test_what_is_opened_strictly_and_replayed(
    form: str, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and the graphs that move states are held to their provider; only a static cache's step repeats."""
    opened = {}

    def look(path: Path, placement: Placement, kind: GraphKind, changed: FormedGraph | None = None) -> Any:
        opened[path.stem] = kind
        return inference_session(path, placement, kind, changed)

    monkeypatch.setattr(graphs, "inference_session", look)
    settings = OrtSettings(threads=1, on_device=True)
    with OrtSession(graphs.model_from_bundle(open_bundle(bundles[form]), "fp32"), settings) as session:
        generate(session, SOURCES, SearchOptions(max_length=6, beam=2))
    assert {name for name, kind in opened.items() if kind.strict} == opened.keys() - {"encoder"}
    assert {"gather_rows"} <= opened.keys()
    assert [name for name, kind in opened.items() if kind.replayed] == ["decoder_step"] * (form == "static")


def plug_in(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    module: Any = ModuleType(PLUG_IN)
    module.__spec__ = importlib.machinery.ModuleSpec(PLUG_IN, None)
    module.get_ep_name = lambda: PROVIDERS["nv_tensorrt_rtx"].name
    module.get_library_path = lambda: path
    monkeypatch.setitem(sys.modules, PLUG_IN, module)


def test_the_rtx_provider_is_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "librtx.so")
    gpu = SimpleNamespace(ep_name=PROVIDERS["nv_tensorrt_rtx"].name)
    devices: list[Any] = []
    calls: list[Any] = []

    def register(name: str, path: str) -> None:
        calls.append((name, path))
        devices.append(gpu)

    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    monkeypatch.setattr(ort, "register_execution_provider_library", register)
    options = SimpleNamespace(
        add_session_config_entry=lambda *entry: None,
        add_provider_for_devices=lambda chosen, values: calls.append((chosen, values)),
    )
    for _ in range(2):  # registered once
        assert arguments_for("nv_tensorrt_rtx", options, tmp_path / "encoder.onnx", "fp32") == {}
    added = ([gpu], {"nv_runtime_cache_path": str(tmp_path / ".nv_tensorrt_rtx")})
    assert calls == [(gpu.ep_name, "librtx.so"), added, added]
    monkeypatch.setattr(ort, "get_ep_devices", list)
    with pytest.raises(SessionError, match="provider nv_tensorrt_rtx finds no GPU on this machine; use --provider cpu"):
        arguments_for("nv_tensorrt_rtx", options, tmp_path / "encoder.onnx", "fp32")


def test_a_library_that_cannot_be_loaded(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real ONNX Runtime's own words, in one line."""
    plug_in(monkeypatch, str(tmp_path / "librtx.so"))
    with pytest.raises(SessionError) as caught:
        open_session(copy_of_graphs(bundles, tmp_path), provider="nv_tensorrt_rtx", threads=1)
    assert str(caught.value).startswith(f"ONNX Runtime {ort.__version__} cannot load ")
    assert "librtx.so" in str(caught.value)
    assert "\n" not in str(caught.value)
