"""Every way to decode takes the model's own defaults: its first token, its beams, its bans."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.hugging_face_models import library_outputs, saved, small_model, sources
from support.rounding import rounding_from_session
from support.text_bundle import CONFIG, TOKENIZER, text_bundle

from seq2engine.benchmarks.arms import quality_of_arms
from seq2engine.benchmarks.cases import Case
from seq2engine.benchmarks.options import BenchOptions, plan_from_options
from seq2engine.common.progress import silent
from seq2engine.errors import ConfigError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import write_checkpoint
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.runtime.generate import generate
from seq2engine.runtime.model_options import measured_options, options_from_session
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.compare import parities_of_sessions, searches_of
from seq2engine.runtime.parity.options import ParityOptions
from seq2engine.runtime.parity.sessions import Compared
from seq2engine.runtime.search.options import SearchOptions, checked_values
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.text.scoring import score_targets
from seq2engine.runtime.translator import Translator

TEXTS = ["abc", "hij", "decade", "b", "fig", "chief", "badge"]
OWN = {
    "forced_bos": 7,
    "beam": 3,
    "length_penalty": 0.2,
    "banned": [[5]],
    "no_repeat_ngram": 2,
    "start": 6,
    "max_length": 9,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("own"), **OWN)


@pytest.fixture(scope="module")
def session(bundle):
    with open_session(bundle, threads=1) as opened:
        yield opened


def decoded_by_run(cli, bundle, *flags):
    """Texts and tokens of the command line."""
    code, out, err = cli("run", bundle.root, *TEXTS, "--json", *flags)
    assert (code, err) == (0, "")
    best = [json.loads(line)["hypotheses"][0] for line in out.splitlines()]
    return [one["text"] for one in best], [tuple(one["tokens"]) for one in best]


def ids_of(texts):
    return [TOKENIZER.encode_source(text) for text in texts]


def test_run_translate_and_generate_are_one(cli, bundle, session):
    texts, tokens = decoded_by_run(cli, bundle)
    assert all(row[0] == 7 and 5 not in row and len(row) <= 9 for row in tokens)
    assert Translator(bundle, session, TOKENIZER).translate(TEXTS) == texts
    assert [best.tokens for best, *_ in generate(session, ids_of(TEXTS))] == tokens
    found = dict(translate_many(session, ids_of(TEXTS), batch=3))
    assert [found[row][0].tokens for row in range(len(TEXTS))] == tokens
    plain = [best.tokens for best, *_ in generate(session, ids_of(TEXTS), SearchOptions(max_length=9, beam=3))]
    assert plain != tokens  # options that are given are taken at their word


@pytest.mark.parametrize("beam", [1, 3])  # 3 are the model's own
def test_parity_and_benchmark_decode_as_run_does(cli, bundle, session, beam):
    texts, tokens = decoded_by_run(cli, bundle, "--beam", beam)
    with open_session(bundle, "torch", "fp64") as oracle, open_session(bundle, "torch", "fp32") as reference:
        compared = [Compared(oracle, reference, session)]
        (result,), outputs = parities_of_sessions(compared, reference, "PyTorch", ids_of(TEXTS), ParityOptions())
        assert result, result.reason
    search = "greedy" if beam == 1 else "beam 3"
    assert [outputs["onnxruntime fp32", search][row] for row in range(len(TEXTS))] == tokens
    right = {text: [output] for text, output in zip(TEXTS, texts, strict=True)}
    case = Case("one", batch=1, beam=beam, source=4, target=4)
    plan = plan_from_options(bundle, BenchOptions(cases=[case], references=right))
    rates = quality_of_arms(plan, {"arm": session}, silent)["arm"]
    assert [(one.search, one.marked.lines) for one in rates] == [(search, 0.0)]


def test_error_rates_of_parity_are_those_of_run(cli, bundle, tmp_path):
    texts, _ = decoded_by_run(cli, bundle)
    (tmp_path / "right.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in zip(TEXTS, texts, strict=True)))
    code, out, _ = cli("parity", bundle.root, "--references", tmp_path / "right.tsv", "--json", "--quiet")
    quality = json.loads(out)["quality"]["onnxruntime fp32"]
    assert code == 0
    assert {one["search"]: one["marked"]["lines"] for one in quality}["beam 3"] == 0.0


def test_scores_are_of_the_model_s_own_start(bundle, session):
    rows = ids_of(TEXTS)
    best = [found[0] for found in generate(session, rows)]
    scores = score_targets(session, rows, [one.tokens for one in best])
    near = rounding_from_session(session, rows, session.config.max_target)
    for score, one in zip(scores, best, strict=True):
        assert score.log_probs == pytest.approx(one.log_probs, rel=0, abs=near.log_prob)


def test_a_language_is_asked_for(cli, bundle, session, monkeypatch):
    monkeypatch.setattr(type(TOKENIZER), "language_id", lambda self, language: {"fra": 8}[language])
    texts, tokens = decoded_by_run(cli, bundle, "--to", "fra")
    assert {row[0] for row in tokens} == {8}
    model = Translator(bundle, session, bundle.tokenizer())
    assert model.translate(TEXTS, target_language="fra") == texts
    options = options_from_session(session, beam=1)
    assert options.forced_bos == 7
    asked = model.translate(TEXTS, options, target_language="fra")
    assert asked == decoded_by_run(cli, bundle, "--to", "fra", "--beam", 1)[0]
    assert asked == model.translate(TEXTS, beam=1, target_language="fra")


def test_what_is_measured_draws_nothing_and_needs_no_attention(tmp_path):
    own = {"sample": True, "temperature": 0.7, "top_k": 5, "nbest": 3, "forced_bos": 7}
    with open_session(text_bundle(tmp_path / "sampling", **own), threads=1) as opened:
        assert measured_options(opened, 4) == SearchOptions(CONFIG.max_target, 4, forced_bos=7, scores=False)
    own = {"coverage_penalty": 0.3, "alignments": True, "beam": 2, "max_length": 5}
    with open_session(text_bundle(tmp_path / "coverage", **own), threads=1) as opened:
        assert measured_options(opened, 4, longest=9) == SearchOptions(5, 4, scores=False)
        assert measured_options(opened, 4, longest=3).max_length == 3


def test_parity_decodes_with_the_models_own_rules(tmp_path):
    """The repetition penalty too: divergences are judged by penalised scores (parity/levels/divergence.py)."""
    own = {"repetition_penalty": 1.5, "no_repeat_ngram": 2, "banned": [[5]], "forced_bos": 7}
    with open_session(text_bundle(tmp_path / "penalty", **own), threads=1) as opened:
        measured = measured_options(opened, 4, 9)
        assert measured.repetition_penalty == 1.5
        greedy, beam = searches_of(opened, 9, 4)
        assert beam == measured
        assert greedy == dataclasses.replace(beam, beam=1)
        assert searches_of(opened, 9, 4, forced_bos=8)[1] == dataclasses.replace(beam, forced_bos=8)


@pytest.mark.parametrize("family", ["mbart", "m2m_100"])
def test_a_multilingual_model_decodes_as_the_library_does(tmp_path, family):
    """With nothing but the bundle: its first token, beams and bans came along."""
    model = small_model(family, 2)
    own = {"max_length": 14, "num_beams": 4, "forced_bos_token_id": 9, "bad_words_ids": [[1], [20]]}
    folder = saved(model, tmp_path / "theirs", **own)
    imported = checkpoint_from_hugging_face(folder)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_checkpoint(imported.model, checkpoint)
    (checkpoint / "generation.json").write_text(json.dumps(imported.generation))
    made = onnx_from_model(imported.model, tmp_path / "bundle", companions=checkpoint)
    with open_session(made, threads=1) as opened:
        found = [list(best.tokens) for best, *_ in generate(opened, sources())]
    assert found == library_outputs(type(model).from_pretrained(folder).eval(), sources())
    assert {row[0] for row in found} == {9}


WRONG = {
    "forced_eos": ["x", [], 1.5],
    "beam": [None, "2", 1.5, []],
    "length_penalty": ["x", None, [1]],
    "banned": [3, [3], [["q"]], {}],
    "prefix": [["q"], 3, [1.5]],
    "max_length": [None, "x"],
    "early_stopping": [1.5, []],
    "sample": ["x", 1],
    "trie": [3, [3]],
    "nonsense": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_default_of_a_wrong_type_is_one_line(name, value):
    with pytest.raises(ConfigError, match=f"^generation.json: .*{name}.*; expected fields of SearchOptions$"):
        checked_values({name: value}, "generation.json")
