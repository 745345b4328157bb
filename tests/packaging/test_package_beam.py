"""Beam search of a package: token for token what `generate` gives for the same bundle."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cudart_stand_in import Cudart
from support.handed_over import OWN_OPTIONS, forget_scripts, ran, script
from support.stand_in_engines import FOUR_BEAMS, MODEL, NARROWER, SOURCES, THREE_BEAMS, put_engines
from support.tensorrt_stand_in import tensorrt_stand_in
from support.text_bundle import text_bundle

from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.packaging.decodes import decode_values
from seq2engine.packaging.package import PackageOptions, package_from_bundle
from seq2engine.runtime.defaults import Defaults
from seq2engine.runtime.generate import generate
from seq2engine.runtime.model_options import measured_options
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.option_checks import BEAM_STYLES

# One option of a model's own each.
OPTIONS: list[dict[str, Any]] = [
    {"length_penalty": 0.0},
    {"length_penalty": 2.0},
    {"length_penalty": -0.5},
    {"early_stopping": True},
    {"early_stopping": "never"},
    *OWN_OPTIONS,
]
PADDED = ShapeRanges(Range(2, 2, 4), Range(4, 4, 4), Range(4, 8, 16), Range(1, 8, 12))  # no single or short source
ALL = [*SOURCES, *SOURCES[:2]]  # more than fit one batch


@pytest.fixture(autouse=True)
def scripts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    forget_scripts()


@pytest.mark.slow
@pytest.mark.parametrize("beam_style", BEAM_STYLES)
@pytest.mark.parametrize(
    ("form", "ranges"),
    [("static", FOUR_BEAMS), ("static", PADDED), ("growing", FOUR_BEAMS), ("growing", PADDED)],
    ids=["static", "static padded", "growing", "growing padded"],
)
def test_beam_search_is_that_of_generate(
    form: str, ranges: ShapeRanges, beam_style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams 1, 2 and 4 of every option, and 4 of pairs, half of them with each library's search.

    Fewer beams than the engines take, too, and engines of several profiles.
    """
    bundle = onnx_from_model(MODEL, tmp_path / "run7", ("fp32",), form)
    narrower = NARROWER if ranges is FOUR_BEAMS and form == "static" else ()
    put_engines(bundle, ranges, flavour="tensorrt", name="one", narrower=narrower)
    package_from_bundle(bundle, tmp_path / "out", PackageOptions(threads=1))
    monkeypatch.setitem(sys.modules, "tensorrt", trt := tensorrt_stand_in("tensorrt"))
    script(tmp_path / "out", "decode")
    files, decoded = sys.modules["package_files"], sys.modules["beam"].decoded_by_beam
    package = files.read_package()
    folder, built = files.read_engines(package, None)
    both = [{**a, **b} for a, b in itertools.combinations(OPTIONS, 2)]
    pairs = [{}, *OPTIONS, *both[BEAM_STYLES.index(beam_style) :: 2]]
    if beam_style == "ctranslate2":
        pairs += [{**values, "patience": 2.0} for values in OPTIONS]
    outputs = set()
    cudart = Cudart()
    with (
        open_session(bundle, "onnxruntime", "fp32", 1) as session,
        sys.modules["cuda_memory"].Cuda(cudart) as cuda,
        sys.modules["model_engines"].ModelEngines(package, cuda, trt, folder, built) as model,
    ):
        for number, values in enumerate(pairs if (form, ranges) == ("static", FOUR_BEAMS) else pairs[::9]):
            session.defaults = Defaults({"beam_style": beam_style, **values})
            package["decode"] = json.loads(json.dumps(decode_values(session, 12, 0.0)))
            beams = (1, 2, 4) if number < 1 + len(OPTIONS) else (4,)
            for beam in beams:
                expected = [nbest[0].tokens for nbest in generate(session, ALL, measured_options(session, beam, 12))]
                assert list(map(tuple, decoded(model, ALL, beam))) == expected, (values, beam)
                outputs.add(tuple(expected))
        session.defaults = Defaults({"beam_style": beam_style, "forced_bos": 9})  # as of a language that is asked for
        expected = [nbest[0].tokens for nbest in generate(session, ALL, measured_options(session, 3, 5))]
        package["decode"] = json.loads(json.dumps(decode_values(session, 12, 0.0))) | {"forced_start": [7]}
        assert list(map(tuple, decoded(model, ALL, 3, first=9, longest=5))) == expected
    assert len(outputs) > 4  # beams and options do something
    assert not trt.broken
    assert not cudart.memory


def test_the_models_own_beams_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = text_bundle(tmp_path, beam=3, length_penalty=2.0)
    put_engines(bundle, FOUR_BEAMS, flavour="tensorrt", name="one")
    package_from_bundle(bundle, out := tmp_path / "out", PackageOptions(threads=1))
    plain = ran(out, "decode", monkeypatch, capsys, "abc", "jig")
    assert plain == ran(out, "decode", monkeypatch, capsys, "abc", "jig", "--beam", 3)
    assert plain[::2] == (0, "")
    assert plain != ran(out, "decode", monkeypatch, capsys, "abc", "jig", "--beam", 1)
    error = "error: beam 5, the engines take 1 to 4; package the model with a wider --beam\n"
    assert ran(out, "decode", monkeypatch, capsys, "abc", "--beam", 5) == (1, "", error)
    with pytest.raises(SystemExit, match="2"):
        ran(out, "decode", monkeypatch, capsys, "abc", "--beam", 0)


def test_engines_that_do_not_serve_the_models_own_beams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = text_bundle(tmp_path, beam=4)
    put_engines(bundle, THREE_BEAMS, flavour="tensorrt", name="one", slots=30)
    package_from_bundle(bundle, out := tmp_path / "out", PackageOptions(threads=1))
    _, printed, noted = ran(out, "decode", monkeypatch, capsys, "abc")
    assert noted == "decoding greedily: the model's own default is 4 beams, the engines take 3\n"
    assert printed == ran(out, "decode", monkeypatch, capsys, "abc", "--beam", 1)[1]
    code, printed, noted = ran(out, "decode", monkeypatch, capsys, "abc", "--beam", 3)
    assert (code, noted) == (
        0,
        "outputs have at most 10 tokens: the engines' 30 cache slots hold no more of 3 beams\n",
    )
    refused = ran(out, "decode", monkeypatch, capsys, "abc", "--beam", 3, "--max-length", 11)
    assert refused[0] == 1
    assert refused[2].endswith("error: length 11, at most 10 are supported\n")


def test_a_coverage_penalty_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = text_bundle(tmp_path, beam=2, coverage_penalty=0.3)
    put_engines(bundle, FOUR_BEAMS, flavour="tensorrt", name="one")
    package_from_bundle(bundle, out := tmp_path / "out", PackageOptions(threads=1))
    code, printed, errors = ran(out, "decode", monkeypatch, capsys, "abc")
    asked = "error: this model's own beam search asks for a coverage penalty, which decode.py does not do"
    assert (code, printed, errors) == (1, "", f"{asked}; decode greedily with: --beam 1\n")
    assert ran(out, "decode", monkeypatch, capsys, "abc", "--beam", 1)[0] == 0
