"""The Translator: text in, text out, with the model's own defaults, on every road the same."""

from __future__ import annotations

import dataclasses
import json
from itertools import combinations
from typing import get_type_hints

import pytest
from support.multilingual_bundle import LANGUAGES, multilingual_bundle
from support.multilingual_bundle import TOKENIZER as PIECES
from support.rounding import rounding_from_session
from support.text_bundle import TOKENIZER, text_bundle

import seq2engine
from seq2engine.errors import ConfigError, RequestError, UsageError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.generate import generate
from seq2engine.runtime.model_options import SearchFields
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.text.lines import Line
from seq2engine.runtime.text.scoring import TargetScore
from seq2engine.runtime.text.streaming import settled

TEXTS = ["abc", "", "hij", "decade", "b", "fig", "chief"]
# What one field of the search options may be set to; every pair of them is tried.
FIELDS = [
    {"beam": 3},
    {"max_length": 5},
    {"length_penalty": 0.5},
    {"no_repeat_ngram": 1},
    {"repetition_penalty": 1.3},
    {"banned": ((5,), (6, 7))},
    {"shortlist": (4, 5, 6, 7, 8, 9)},
    {"prefix": (6, 8)},
    {"phrases": ((9, 4),)},
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("text"), beam=2, max_length=9, banned=[[5]])


@pytest.fixture(scope="module")
def model(bundle):
    with seq2engine.load(bundle.root, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory):
    with seq2engine.load(multilingual_bundle(tmp_path_factory.mktemp("languages")), threads=1) as opened:
        yield opened


def expected(model, texts, options):
    rows = [TOKENIZER.encode_source(text) for text in texts if text]
    found = iter(generate(model.session, rows, options))
    return [TOKENIZER.decode_target(next(found)[0].tokens) if text else "" for text in texts]


def test_a_text_gives_a_text_and_a_list_a_list(model):
    own = SearchOptions(max_length=9, beam=2, banned=((5,),))
    assert model.options() == own
    assert model.translate(TEXTS) == expected(model, TEXTS, own)
    assert model.translate("abc") == expected(model, ["abc"], own)[0]
    assert model.translate([]) == []
    assert list(model.translate_iter(f"{text}\r\n" for text in TEXTS)) == model.translate(TEXTS)


@pytest.mark.parametrize("pair", [a | b for a, b in combinations(FIELDS, 2)], ids=str)
def test_any_two_options_are_those_of_generate(model, pair):
    options = SearchOptions(**{"max_length": 9, "beam": 2, "banned": ((5,),), **pair})
    assert model.translate(TEXTS, **pair) == expected(model, TEXTS, options)
    assert list(model.translate_iter(TEXTS, options, batch=2)) == expected(model, TEXTS, options)


def test_fields_are_those_of_the_search_options():
    assert set(get_type_hints(SearchFields)) == {field.name for field in dataclasses.fields(SearchOptions)}


def test_options_that_cannot_be_meant_are_refused(model):
    with pytest.raises(UsageError, match="unknown search option length_penality; did you mean length_penalty"):
        model.translate("abc", length_penality=2.0)
    with pytest.raises(UsageError, match="unknown search option xyzzy; expected one of max_length, beam"):
        model.options(xyzzy=1)
    with pytest.raises(UsageError, match="options together with beam, expected either all options or fields"):
        model.translate("abc", SearchOptions(), beam=2)
    with pytest.raises(UsageError, match="target_language together with forced_bos, expected one"):
        model.translate("abc", target_language="fra", forced_bos=7)
    with pytest.raises(ConfigError, match="beam 0, expected at least 1"):
        model.translate("abc", beam=0)
    with pytest.raises(RequestError, match="has no languages"):
        model.translate("abc", target_language="fra")
    with pytest.raises(UsageError, match="stream with beams"), model.stream("abc", beam=2):
        pass
    with pytest.raises(UsageError, match="one text and a list of texts"):
        model.score("abc", ["a"])


def test_a_text_that_cannot_be_decoded_is_named(model):
    with pytest.raises(RequestError, match=r"^text 2: 31 tokens, at most 16"):
        model.translate(["a", "b" * 30])
    with pytest.raises(RequestError, match=r"^line 2: 31 tokens, at most 16"):
        list(model.translate_iter(["a", "b" * 30]))
    assert len(model.translate(["a", "b" * 30], truncate=True)) == 2
    found = list(model.translate_lines([Line(1, "a"), Line(2, "b" * 30)]))
    assert [one.error is None for one in found] == [True, False]


def test_the_command_line_outputs_the_same(cli, model, bundle):
    for flags, fields in (((), {}), (("--beam", 3, "--no-repeat-ngram", 1), {"beam": 3, "no_repeat_ngram": 1})):
        code, out, err = cli("run", bundle.root, *[text for text in TEXTS if text], *flags)
        assert (code, err) == (0, "")
        assert out.removesuffix("\n").split("\n") == model.translate([text for text in TEXTS if text], **fields)


def test_scores_are_those_of_the_outputs(model):
    rows = [TOKENIZER.encode_source(text) for text in TEXTS if text]
    for source, row in zip([text for text in TEXTS if text], rows, strict=True):
        best = generate(model.session, [row], model.options())[0][0]
        if best.tokens[-1] != model.session.config.end_id:
            continue
        score = model.score(source, TOKENIZER.decode_target(best.tokens))
        assert isinstance(score, TargetScore)
        assert score.tokens == best.tokens
        near = rounding_from_session(model.session, [row], 9)
        assert score.log_probs == pytest.approx(best.log_probs, rel=0, abs=near.log_prob)
    assert [len(one.tokens) for one in model.score(["abc", "a"], ["ab", "c"])] == [3, 2]


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_a_stream_is_the_greedy_output_in_pieces(model, multilingual, text):
    with model.stream(text) as pieces:
        found = list(pieces)
    assert "".join(found) == model.translate(text, beam=1)
    assert all(found)
    with multilingual.stream(text, target_language="fra", max_length=8) as pieces:
        found = list(pieces)
    assert "".join(found) == multilingual.translate(text, target_language="fra", max_length=8)
    assert len(found) > 1


def test_a_stream_may_be_left(model):
    whole = model.translate("decade", beam=1)
    with model.stream("decade") as pieces:
        first = next(pieces)
    assert whole.startswith(first)
    with pytest.raises(StopIteration):
        next(pieces)
    with model.stream(" ") as pieces:
        assert list(pieces) == []


def test_bytes_wait_for_their_character():
    assert settled("na\ufffd") == "na"
    assert settled("na\ufffd\ufffd") == "na"
    assert settled("naïve ") == "naïve"
    assert settled("a\ufffdb") == "a\ufffdb"


def test_attention_of_an_output_or_of_a_given_one(model):
    view = model.attention("abc")
    assert view
    assert view.output == model.translate("abc")
    forced = model.attention("abc", "hi", max_length=5)
    assert forced.target == ("h", "i", "</s>")
    assert forced.weights.shape[2:] == (3, 4)
    with pytest.raises(RequestError, match="the target has 14 tokens, at most 12"):
        model.attention("abc", "h" * 13)


def test_tokens_have_names(model, multilingual):
    assert model.tokens([TOKENIZER.encode_target("ab"), [2]]) == [["a", "b", "</s>"], ["</s>"]]
    assert multilingual.tokens([[121, 2]]) == [["fra", "</s>"]]


def test_a_bundle_without_a_tokenizer_takes_ids(tmp_path, bundle):
    with seq2engine.load(onnx_from_model(random_model("tiny"), tmp_path / "ids", ("fp32",)), threads=1) as model:
        assert not model.takes_text
        tokens = generate(model.session, [[5, 6]], model.options(max_length=4))[0][0].tokens
        assert model.translate("5 6", max_length=4) == " ".join(map(str, tokens))
        assert model.tokens([[7]]) == [["7"]]
        assert model.score("5 6", "7 8").tokens == (7, 8)
    with seq2engine.load(bundle, threads=1, ids=True) as model:
        assert model.translate("5 6").split()[0].isdigit()
        assert model.tokens([[6]]) == [TOKENIZER.target_tokens([6])]


class TestLanguages:
    """Every road decodes a model of many languages to the one that is asked for."""

    def test_run_and_translate(self, cli, multilingual):
        texts = ["hello world", "abc"]
        code, out, _ = cli("run", multilingual.bundle.root, *texts, "--to", "fra", "--from", "eng", "--json")
        assert code == 0
        best = [json.loads(line)["hypotheses"][0] for line in out.splitlines()]
        assert {one["tokens"][0] for one in best} == {LANGUAGES["fra"]}
        found = multilingual.translate(texts, source_language="eng", target_language="fra")
        assert found == [one["text"] for one in best]
        assert found != multilingual.translate(texts, source_language="eng", target_language="zho")

    def test_a_score_counts_the_language(self, multilingual):
        score = multilingual.score("hello", "abc", target_language="fra")
        assert score.tokens == (LANGUAGES["fra"], *PIECES.encode_target("abc"))

    @pytest.mark.parametrize("command", ["parity", "bench"])
    def test_parity_and_benchmark(self, cli, multilingual, tmp_path, command):
        """The references are the model's outputs in French from English, so no line is wrong."""
        texts = ["hello world", "abc", "zebra fish", "no"]
        right = multilingual.translate(texts, source_language="eng", target_language="fra", beam=4)
        (tmp_path / "right.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in zip(texts, right, strict=True)))
        flags = {"parity": (), "bench": ("--case=1x4x4x4", "--rounds=1", "--quick", "--backend=onnxruntime")}[command]
        given = (multilingual.bundle.root, "--references", tmp_path / "right.tsv", "--json", "--quiet", *flags)
        code, out, err = cli(command, *given, "--from", "eng", "--to", "fra", "--out", tmp_path / "report.html")
        assert code == 0, err
        quality = json.loads(out)["quality"]["onnxruntime fp32"]
        assert {one["search"]: one["marked"]["lines"] for one in quality}["beam 4"] == 0.0
        _, out, _ = cli(command, *given, "--from", "eng", "--to", "zho", "--out", tmp_path / "other.html")
        quality = json.loads(out)["quality"]["onnxruntime fp32"]
        assert {one["search"]: one["marked"]["lines"] for one in quality}["beam 4"] > 0.0
