"""Drafts or none, by made-up times: the faster way is taken, and another that becomes faster is found."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.workers import workers_for_few_rows

from seq2engine.common.measured import Measured
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.backends import AUTO
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.ort import speculative
from seq2engine.runtime.ort.drafting import AGAIN, FIRST, LONGEST, REMEMBERED, TRIAL, Drafting, DraftLength
from seq2engine.runtime.ort.session import OrtSession
from seq2engine.runtime.ort.speculative import SpeculativeSession
from seq2engine.runtime.search.options import SearchOptions


def share_drafted(drafting: Drafting, steps: int, drafted: float, plain: float) -> float:
    """Runs steps that take this many seconds per token; returns the share of them that had drafts."""
    count = 0
    for _ in range(steps):
        drafts = drafting.next()
        count += drafts
        drafting.note(drafts, 4 * drafted if drafts else plain, 4 if drafts else 1)
    return count / steps


@pytest.mark.parametrize("before", [None, 0.5, 2.0])
def test_the_faster_way_is_taken_whatever_was_kept(before: float | None, tmp_path: Path) -> None:
    kept = Measured(tmp_path, {})
    if before is not None:
        kept.keep({"speedup": before})
    assert share_drafted(Drafting(kept), 8 * AGAIN, 1.0, 2.0) > 0.8
    assert share_drafted(Drafting(kept), 8 * AGAIN, 2.0, 1.0) < 0.2


def test_a_session_begins_with_what_was_better_before(tmp_path: Path) -> None:
    first = Drafting(Measured(tmp_path, {}))
    share_drafted(first, AGAIN, 2.0, 1.0)
    first.keep()
    assert share_drafted(Drafting(Measured(tmp_path, {})), AGAIN - 1, 2.0, 1.0) == 0
    assert share_drafted(Drafting(Measured(tmp_path, {"another": "model"})), TRIAL - 1, 2.0, 1.0) == 1


def learned(draft: float, step: float, row: float, right: float, before: DraftLength | None = None) -> int:
    """The tokens of a step after many, where a draft takes `draft` seconds, a step `step` and `row` for each token."""
    length, credit = before or DraftLength(), 0.0
    for _ in range(8 * REMEMBERED):
        count = length.most
        length.note_step(count, (count - 1) * draft, step + count * row)
        for _ in range(count - 1):
            credit += right
            length.note_draft(credit >= 1)
            if credit < 1:
                break
            credit -= 1
    return length.most


def best_of(draft: float, step: float, row: float, right: float) -> int:
    def seconds(count: int) -> float:
        return ((count - 1) * draft + step + count * row) / sum(right**place for place in range(count))

    return min(range(2, LONGEST + 1), key=seconds)


@pytest.mark.parametrize(
    ("draft", "step", "row", "right"),
    [(1, 4, 0.1, 0.99), (1, 4, 0.1, 0.5), (1, 1.5, 0, 0.9), (1, 4, 3, 0.95), (1, 100, 0, 0.999), (3, 4, 0.5, 0.8)],
)
def test_length_of_drafts_is_the_fastest(draft: float, step: float, row: float, right: float) -> None:
    """Found from what was measured; one step more or less takes nearly the same time."""
    assert abs(learned(draft, step, row, right) - best_of(draft, step, row, right)) <= 1


def test_a_delayed_step_makes_no_shorter_one_seem_free() -> None:
    """The line through two lengths that are next to each other can be steep by chance."""
    length = DraftLength()
    length.note_step(8, 7.0, 4.0)
    length.note_step(9, 8.0, 40.0)
    assert length.line_of_steps()(2) == 4.0
    assert length.most == 8


def test_length_of_drafts_is_found_again_on_a_machine_that_changes() -> None:
    length = DraftLength()
    assert length.most == FIRST
    assert learned(1, 100, 0, 0.99, length) == LONGEST
    assert learned(4, 4, 1, 0.5, length) == 2
    assert learned(1, 100, 0, 0.99, length) == LONGEST


def test_a_way_that_becomes_faster_is_found() -> None:
    drafting = Drafting()
    share_drafted(drafting, 2 * AGAIN, 1.0, 2.0)
    assert drafting.drafts
    share_drafted(drafting, 4 * AGAIN, 3.0, 2.0)
    assert not drafting.drafts
    share_drafted(drafting, 4 * AGAIN, 1.0, 2.0)
    assert drafting.drafts


def test_one_step_that_was_held_up_changes_nothing() -> None:
    drafting = Drafting()
    share_drafted(drafting, TRIAL, 1.0, 1.5)
    drafting.note(True, 1000.0, 1)
    share_drafted(drafting, 2 * TRIAL, 1.0, 1.5)
    assert drafting.drafts
    assert drafting.speedup == pytest.approx(1.5, rel=0.05)


def test_both_are_known_before_there_is_a_speedup() -> None:
    drafting = Drafting()
    drafting.note(True, 1.0, 4)
    assert drafting.speedup is None


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dataclasses.replace(PRESETS["tiny"], source_vocab=60, target_vocab=60, max_source=24, max_target=40)
    folder = tmp_path_factory.mktemp("drafting") / "bundle"
    onnx_from_model(random_model(config, seed=3), folder, ("fp32", "w8a8"))
    return folder


@pytest.fixture
def small_ones_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "WORTH_IT", 1)
    monkeypatch.setattr(speculative, "OPENING", 0.0)


def test_a_small_model_goes_without(bundle: Path) -> None:
    with open_session(bundle, threads=1, draft=AUTO) as session:
        assert isinstance(session, OrtSession)


def test_the_draft_is_opened_once_single_sources_have_taken_their_time(
    bundle: Path, small_ones_draft: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculative, "OPENING", 3600.0)
    options = SearchOptions(max_length=40, min_length=40, scores=False)
    with open_session(bundle, threads=1, draft=AUTO) as session:
        assert isinstance(session, SpeculativeSession)
        generate(session, [[5, 6, 7]], options)
        assert "draft" not in vars(session)
        assert session.undrafted > 0
        session.undrafted = 3600.0
        generate(session, [[5, 6, 7]], options)
        assert "draft" in vars(session)


def test_auto_opens_the_draft_for_single_sources(bundle: Path, small_ones_draft: None) -> None:
    options = SearchOptions(max_length=40, min_length=40, scores=False)
    with open_session(bundle, threads=1) as plain, open_session(bundle, threads=1, draft=AUTO) as session:
        assert isinstance(session, SpeculativeSession)
        several = [[5, 6, 7], [8, 9]]
        assert generate(session, several, options)[1][0].tokens == generate(plain, several, options)[1][0].tokens
        assert "draft" not in vars(session)
        for _ in range(4):
            assert (
                generate(session, [[5, 6, 7]], options)[0][0].tokens
                == generate(plain, [[5, 6, 7]], options)[0][0].tokens
            )
        assert "draft" in vars(session)
        assert session.drafting is not None
        assert session.drafting.speedup is not None


@pytest.mark.parametrize("given", [{"precision": "w8a8"}, {"attention": True}, {"deterministic": True}])
def test_auto_goes_without_where_nothing_can_draft(
    bundle: Path, small_ones_draft: None, given: dict[str, object]
) -> None:
    with open_session(bundle, threads=1, draft=AUTO, **given) as session:  # type: ignore[arg-type]
        assert isinstance(session, OrtSession)


def test_a_large_batch_has_parallel_workers_as_without_drafts(
    bundle: Path, small_ones_draft: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers_for_few_rows(monkeypatch)
    sources = [[5 + number % 40, 6, 7] for number in range(70)]
    options = SearchOptions(max_length=6, scores=False)
    with open_session(bundle, threads=2) as plain, open_session(bundle, threads=2, draft=AUTO) as session:
        assert session.workers is not None
        assert len(session.workers.for_batch(70, 70)) == 2
        expected = [nbest[0].tokens for nbest in generate(plain, sources, options)]
        assert [nbest[0].tokens for nbest in generate(session, sources, options)] == expected
    assert session.workers is None
