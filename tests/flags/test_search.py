"""`seq2engine run` with search options that come as text or files, and with what it shows of scores and alignments."""

from __future__ import annotations

import json

import pytest
from support.rounding import rounding_from_session
from support.text_bundle import TOKENIZER, VOCAB, text_bundle

from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions

WRITTEN = 0.51e-6  # six decimals, and a hundredth for their being binary
END = TOKENIZER.encode_target("")[-1]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("search")).root


def ids_of(text):
    return tuple(token for token in TOKENIZER.encode_target(text) if token != END)


def lines(text):
    return text.removesuffix("\n").split("\n")


def found(out):
    return [json.loads(line)["hypotheses"] for line in lines(out)]


@pytest.mark.parametrize("beam", [1, 3])
def test_phrases_are_output(cli, bundle, beam):
    code, out, err = cli("run", bundle, "abc", "hi", "--phrases", "ed", "--phrases", "cab", "--beam", beam)
    assert (code, err) == (0, "")
    assert all("ed" in line and "cab" in line for line in lines(out))
    phrase = " ".join(map(str, ids_of("ed")))
    _, out, _ = cli("run", bundle, "--ids", "5 6 7", "--phrases", phrase, "--beam", beam)
    assert phrase in out


@pytest.mark.parametrize("beam", [1, 3])
def test_outputs_are_lines_of_the_trie_s_file(cli, bundle, tmp_path, beam):
    (tmp_path / "names").write_text("bad cab\r\nfed\n\nbad\n")
    code, out, err = cli("run", bundle, "abc", "hi", "d", "--trie", tmp_path / "names", "--beam", beam)
    assert (code, err) == (0, "")
    assert set(lines(out)) <= {"bad cab", "fed", "bad"}
    (tmp_path / "ids").write_text("5 6\n7\n")
    _, out, _ = cli("run", bundle, "--ids", "5 6 7", "--trie", tmp_path / "ids", "--beam", beam)
    assert out in (f"5 6 {END}\n", f"7 {END}\n")


def test_every_line_has_its_own_prefix(cli, bundle, tmp_path, stdin):
    (tmp_path / "prefixes").write_text("bad\n\ncab\nc\n")
    stdin(b"abc\nhij\n\nhi\n")
    code, out, err = cli("run", bundle, "--prefixes", tmp_path / "prefixes", "--json")
    assert (code, err) == (0, "")
    first, second, third, fourth = found(out)
    assert first[0]["text"].startswith("bad")
    assert third == []
    for together, alone in ((second, ("hij",)), (fourth, ("hi", "--prefix", "c"))):
        (expected,) = found(cli("run", bundle, "--json", *alone)[1])
        # Not the scores: kernels for other numbers of rows may round last bits otherwise.
        assert [(one["text"], one["tokens"]) for one in together] == [(one["text"], one["tokens"]) for one in expected]


def test_prefixes_that_are_not_one_for_each_line(cli, bundle, tmp_path):
    (tmp_path / "prefixes").write_text("bad\n" + "a" * 50 + "\n")
    code, out, err = cli("run", bundle, "abc", "hij", "hi", "--prefixes", tmp_path / "prefixes")
    assert code == 1
    assert lines(out)[1:] == ["", ""]
    assert err.splitlines() == [
        "line 2: a prefix of 50 tokens, expected at most the max length 12",
        "line 3: no prefix for it, there are 2; give one for every line",
    ]
    code, _, err = cli("run", bundle, "abc", "--prefixes", tmp_path / "prefixes")
    assert code == 1
    assert f"{tmp_path / 'prefixes'} has 2 lines, but 1 were decoded; give one for each" in err
    _, _, err = cli("run", bundle, "abc", "--prefixes", tmp_path / "prefixes", "--prefix", "a")
    assert "a prefix for all lines and one for each, expected one of the two" in err
    _, _, err = cli("run", bundle, "abc", "--prefixes", tmp_path / "none")
    assert f"cannot read {tmp_path / 'none'}: No such file or directory" in err
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    _, _, err = cli("run", bundle, "abc", "--trie", tmp_path / "bytes")
    assert f"{tmp_path / 'bytes'} is not UTF-8, expected lines of text" in err


def test_scores_and_alignments_stand_behind_the_text(cli, bundle):
    flags = ("--beam", 3, "--nbest", 2, "--coverage-penalty", 0.3)
    (hypotheses,) = found(cli("run", bundle, "abc", "--json", "--alignments", *flags)[1])
    code, out, err = cli("run", bundle, "abc", "--scores", "--alignments", *flags)
    assert (code, err) == (0, "")
    for line, hypothesis in zip(lines(out), hypotheses, strict=True):
        text, score, log_probs, pairs = line.split("\t")
        assert text == hypothesis["text"]
        assert float(score) == pytest.approx(hypothesis["score"], rel=0, abs=WRITTEN)
        assert [float(value) for value in log_probs.split()] == pytest.approx(
            hypothesis["log_probs"], rel=0, abs=WRITTEN
        )
        assert pairs.split() == [f"{place}-{token}" for token, place in enumerate(hypothesis["alignments"])]
        assert len(hypothesis["alignments"]) == len(hypothesis["log_probs"]) == len(hypothesis["tokens"])
    with open_session(bundle, threads=1, attention=True) as session:
        options = SearchOptions(max_length=12, beam=3, nbest=2, coverage_penalty=0.3)
        near = rounding_from_session(session, [TOKENIZER.encode_source("abc")], 12)
        (expected,) = generate(session, [TOKENIZER.encode_source("abc")], options)
    assert [tuple(one["tokens"]) for one in hypotheses] == [one.tokens for one in expected]
    limit = near.log_prob + 0.3 * len(TOKENIZER.encode_source("abc")) * near.attention
    assert [one["score"] for one in hypotheses] == pytest.approx([one.score for one in expected], rel=0, abs=limit)
    assert cli("run", bundle, "abc", "--scores")[1].count("\t") == 2


def test_alternatives_each_begin_otherwise(cli, bundle):
    flags = ("--alternatives", "--nbest", 4, "--prefix", "ba")
    (hypotheses,) = found(cli("run", bundle, "abc", "--json", *flags)[1])
    assert [one["tokens"][:2] for one in hypotheses] == [list(ids_of("ba"))] * 4
    assert len({one["tokens"][2] for one in hypotheses}) == 4
    likely = [one["log_probs"][2] for one in hypotheses]
    assert likely == sorted(likely, reverse=True)
    code, out, _ = cli("run", bundle, "abc", *flags, "--min-alternative-expansion-prob", 0.99)
    assert (code, out) == (0, "\n" * 4)


@pytest.mark.parametrize("flag", ["--allowed", "--shortlist", "--first-banned"])
def test_ids_have_commas_or_spaces_or_the_flag_twice(cli, bundle, flag):
    spellings = [(flag, "5 6 7"), (flag, "5,6,7"), (flag, "5, 6 7"), (flag, "5", flag, "6,7")]
    outputs = [cli("run", bundle, "--ids", "5 6 7", *given) for given in spellings]
    assert outputs[0][0] == 0
    assert outputs[1:] == outputs[:1] * 3
    assert cli("run", bundle, "--ids", "5 6 7", flag, "7")[1] != outputs[0][1] or flag == "--first-banned"
    with pytest.raises(SystemExit, match="2"):
        cli("run", bundle, "--ids", "5 6 7", flag, "5,,7")


def test_every_problem_is_in_one_error(cli, bundle):
    code, out, err = cli("run", bundle, "abc", "--phrases", "a" * 20, "--sample", "--alternatives", "--nbest", 0)
    assert (code, out) == (2, "")
    assert err == (
        "error: search options: nbest 0, expected at least 1 sample; alternatives together with sample, expected one "
        "of them; phrases together with sample, expected greedy or beam search; "
        "phrases of 20 tokens, but the max length leaves room for 12; raise it\n"
    )


def test_problems_that_only_the_model_or_its_tokenizer_sees_are_in_the_same_error(cli, bundle):
    code, out, err = cli(
        "run", bundle, "abc", "--beam", 0, "--nbest", 2, "--prefix", "aQ", "--banned", 99, "--max-length", 13
    )
    assert (code, out) == (2, "")
    assert err == (
        "error: search options: beam 0, expected at least 1; nbest 2, expected 1 to the beam size 0; "
        "--prefix 'aQ' has something the model has no token for, expected text it can output; "
        f"token 99 asked for, but the vocabulary has 0 to {VOCAB - 1}; max length 13, at most 12\n"
    )


def test_texts_the_model_could_not_output_are_refused(cli, bundle, tmp_path):
    (tmp_path / "names").write_text("bad\nQad\n\nbaQ\n")
    for flag in ("--prefixes", "--trie"):
        code, out, err = cli("run", bundle, "abc", "hi", "c", "d", flag, tmp_path / "names")
        assert (code, out) == (1, "")
        assert f"{flag} 'Qad' has something the model has no token for" in err
        assert f"{flag} 'baQ' has" in err
    code, _, err = cli("run", bundle, "abc", "--phrases", "a", "--phrases", "Q")
    assert code == 1
    assert "--phrases 'Q' has something the model has no token for" in err
    _, _, err = cli("run", bundle, "--ids", "5 6", "--prefix", "a", "--beam", 0)
    assert err.startswith("error: search options: beam 0, expected at least 1; --prefix 'a': 'a' is not a token id, ")
    (tmp_path / "many").write_text("".join(f"Q{i}\n" for i in range(9)))
    _, _, err = cli("run", bundle, "abc", "--trie", tmp_path / "many")
    assert "'Q4' has" in err
    assert "'Q5' has" not in err
    assert "; and 4 more texts like that" in err
