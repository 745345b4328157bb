"""What crosses the bus in a step, how often the host waits and what is allocated: counted by the stand-in's device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stand_in_engines import BEAMS, FOUR_BEAMS, MODEL, ONE_BEAM, SOURCES, put_engines, session_over

from seq2engine.export.artifact.bundle import Bundle, open_bundle
from seq2engine.export.artifact.passport import EngineEntry, EngineTensor, Passport
from seq2engine.export.artifact.profiles import Range, ShapeRanges
from seq2engine.export.artifact.transfers import Transfers, transfers_of_token
from seq2engine.export.contract import FOR_CPUS, PRECISIONS, GraphSpec, graph_specs
from seq2engine.export.device_graphs.of_engine import graphs_of_engine, reductions_of_engine
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.generate import generate
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.search.step import Emitted
from seq2engine.runtime.trt.session import TrtSession

MOST_TO_HOST = 20_000  # bytes of a step of 32 sources with four beams and 32,000 tokens


def counted(session: TrtSession, sources: list[list[int]], options: SearchOptions, **given: Any) -> list[Transfers]:
    """What every step took, the first left out: it is sent a whole mask."""
    device: Any = session.device
    before: list[tuple[int, ...]] = []

    def note(emitted: Emitted) -> None:
        before.append((device.sent, device.received, device.waits, device.allocations))

    generate(session, sources, options, on_step=note, **given)
    return [Transfers(*(int(n) for n in step)) for step in np.diff(before, axis=0)]


def whole_decode(session: TrtSession, options: SearchOptions) -> Transfers:
    """What a decode took, its encoder and its first step too."""
    device: Any = session.device
    before = (device.sent, device.received, device.waits, device.allocations)
    generate(session, SOURCES, options)
    after = (device.sent, device.received, device.waits, device.allocations)
    return Transfers(*(now - then for now, then in zip(after, before, strict=True)))


FIXED = {"ignore_eos": True, "max_length": 12}
RANGES = {
    "one beam": ONE_BEAM,
    "1 to 3 beams": BEAMS,
    "1 to 4 beams": FOUR_BEAMS,
    "four beams": dataclasses.replace(FOUR_BEAMS, beam=Range(4, 4, 4)),
}
ENGINE_PRECISIONS = tuple(name for name in PRECISIONS if name not in FOR_CPUS)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    model = random_model(dataclasses.replace(PRESETS["tiny"], positions="learned"), seed=5)
    return onnx_from_model(model, tmp_path_factory.mktemp("transfers") / "run7", ENGINE_PRECISIONS)


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ENGINE_PRECISIONS)
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_steps_take_the_shapes_of_the_passport(precision: str, ranges: ShapeRanges, bundle: Bundle) -> None:
    beams = ranges.beam.max
    folder = put_engines(bundle, ranges, precision, name=f"{precision}-{ranges.beam.min}-{beams}")
    with session_over(folder, tokens_per_wait=1) as session:
        for reduction, given in (("candidates", {}), ("logits", {"logits": True})):
            steps = counted(session, SOURCES, SearchOptions(beam=beams, **FIXED), **given)
            allowed = transfers_of_token(session.passport, reduction, len(SOURCES), beams)
            assert len(steps) == 11
            assert set(steps) == {allowed}, f"{reduction}: {steps[0]}, the passport says {allowed}"
    with session_over(folder) as session:  # eight tokens for a wait
        allowed = transfers_of_token(session.passport, "next_greedy", len(SOURCES), 1)
        eight, twelve = (SearchOptions(ignore_eos=True, max_length=tokens) for tokens in (8, 12))
        whole_decode(session, eight)  # takes the memory of its state, and sends what stays
        found, longer = whole_decode(session, eight), whole_decode(session, twelve)
        assert (found.received, longer.received) == (8 * allowed.received, 12 * allowed.received)
        assert longer.sent == found.sent  # what tokens 9 to 12 need is made on the device
        assert (found.waits, longer.waits) == (1 + 1, 1 + 2)  # the encoder's, and one for eight tokens or fewer
        assert (found.allocations, longer.allocations) == (0, 0)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return onnx_from_model(MODEL, tmp_path_factory.mktemp("growing") / "run7", ENGINE_PRECISIONS, "growing")


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ENGINE_PRECISIONS)
@pytest.mark.parametrize("name", ["one beam", "1 to 4 beams", "four beams"])
def test_a_growing_cache_sends_its_mask_but_reads_candidates(precision: str, name: str, growing: Bundle) -> None:
    ranges = RANGES[name]
    beams = ranges.beam.max
    with session_over(put_engines(growing, ranges, precision, name=f"{precision}-{name}")) as session:
        for reduction, given in (("candidates", {}), ("logits", {"logits": True})):
            steps = counted(session, SOURCES, SearchOptions(beam=beams, **FIXED), **given)
            allowed = transfers_of_token(session.passport, reduction, len(SOURCES), beams)
            assert {(step.received, step.waits, step.allocations) for step in steps} == {(allowed.received, 1, 0)}
            assert max(step.sent for step in steps) <= allowed.sent


def passport_of(precision: str, cache_form: str, beam: Range) -> Passport:
    """That of the `base` model with 32,000 tokens, as a build would write it, without files."""
    ranges = ShapeRanges(Range(1, 8, 32), beam, Range(1, 32, 128), Range(1, 32, 128))
    specs = graph_specs(dataclasses.replace(PRESETS["base"], target_vocab=32_000), precision, cache_form)
    step = specs["decoder_step"]
    tiny = {name: spec for name, (_, spec) in graphs_of_engine(step, cache_form, ranges, ranges.slots).items()}
    engines = {name: entry_of(spec) for name, spec in {**specs, **tiny}.items()}
    reductions = reductions_of_engine(step, cache_form, ranges)
    return Passport("tensorrt_rtx", "", (), precision, cache_form, ranges, ranges.slots, engines, reductions)


def entry_of(spec: GraphSpec) -> EngineEntry:
    sides: Callable[[Any], Any] = lambda side: tuple(EngineTensor(t.name, t.dtype, t.axes) for t in side)  # noqa: E731
    return EngineEntry("", 0, "", "", sides(spec.inputs), sides(spec.outputs), {}, 0, 0, 0, 0.0)


@pytest.mark.parametrize("precision", ENGINE_PRECISIONS)
@pytest.mark.parametrize("beam", [Range(1, 1, 1), Range(4, 4, 4), Range(1, 4, 4)], ids=str)
def test_the_budget_of_32_sources(precision: str, beam: Range) -> None:
    """Of every precision and form: kilobytes, where all logits would be 16 MB."""
    passport = passport_of(precision, "static", beam)
    few = transfers_of_token(passport, "candidates", 32, beam.max)
    assert few.received <= MOST_TO_HOST
    assert few.sent <= 4_000
    assert transfers_of_token(passport, "logits", 32, beam.max).received == 32 * beam.max * 32_000 * 4
    assert transfers_of_token(passport, "next_greedy", 32, 1) == Transfers(0, 32 * 20, 1 / 8)
    growing = transfers_of_token(passport_of(precision, "growing", beam), "candidates", 32, beam.max)
    assert growing.received <= MOST_TO_HOST


@pytest.mark.parametrize("precision", ENGINE_PRECISIONS)
def test_the_table_in_the_documentation(precision: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "TENSORRT.md").read_text()
    for beams, named in ((1, "one beam"), (4, "four beams")):
        passport = passport_of(precision, "static", Range(beams, beams, beams))
        for reduction in ("candidates", "logits"):
            moved = transfers_of_token(passport, reduction, 32, beams)
            assert f"| {reduction}, {named} | {moved.sent:,} bytes | {moved.received:,} bytes | 1 | 0 |" in text
        greedy = transfers_of_token(passport, "next_greedy", 32, 1)
        assert f"| greedy, ahead of the host | 0 | {greedy.received} bytes | 1 for 8 tokens | 0 |" in text


@pytest.mark.slow
def test_32_sources_with_four_beams_and_32000_tokens(tmp_path: Path) -> None:
    """The same, counted: a narrow model with as many tokens."""
    config = dataclasses.replace(
        PRESETS["tiny"], source_vocab=32_000, target_vocab=32_000, d_model=32, d_ff=32, heads=2
    )
    bundle = onnx_from_model(random_model(config, seed=1), tmp_path / "run7", ("fp32",))
    ranges = ShapeRanges(Range(1, 8, 32), Range(4, 4, 4), Range(1, 8, 16), Range(1, 8, 12))
    rng = np.random.default_rng(7)
    sources = [rng.integers(3, 32_000, rng.integers(1, 16)).tolist() for _ in range(32)]
    with session_over(put_engines(bundle, ranges)) as session:
        steps = counted(session, sources, SearchOptions(beam=4, **FIXED))
        assert max(step.received for step in steps) <= MOST_TO_HOST
        assert {step.waits for step in steps} == {1}
        whole = counted(session, sources, SearchOptions(beam=4, **FIXED), logits=True)
        assert {step.received for step in whole} == {16_384_000}


def test_forced_tokens_read_logits_only_while_they_are_forced(bundle: Bundle) -> None:
    folder = bundle.root / "engines" / "fp32-1-4"
    if not folder.is_dir():
        put_engines(open_bundle(bundle.root), FOUR_BEAMS, "fp32", name="fp32-1-4")
    with session_over(folder) as session:
        steps = counted(session, SOURCES, SearchOptions(beam=4, prefix=(5, 6, 7), **FIXED))
        logits = transfers_of_token(session.passport, "logits", 3, 4).received
        few = transfers_of_token(session.passport, "candidates", 3, 4).received
        # The first step is not among them. It reads both, when it is seen that the token is forced.
        assert [step.received for step in steps] == [logits + few] * 2 + [few] * 9
        assert [step.waits for step in steps] == [2] * 2 + [1] * 9
