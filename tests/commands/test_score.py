"""`seq2engine score` as a user types it, and the search flags of `run` that came with it."""

from __future__ import annotations

import json
import math

import pytest
from support.rounding import rounding_from_config, rounding_from_session
from support.text_bundle import CONFIG, TOKENIZER, text_bundle

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.text.scoring import score_targets

NEAR = rounding_from_config(CONFIG, largest=20.0)  # the fixture holds it to what the model's logits are
WRITTEN = 0.5e-6  # six decimals


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("score")).root


@pytest.fixture(scope="module")
def score(bundle):
    with open_session(bundle, threads=1) as session:
        assert rounding_from_session(session, [[5, 6, 7]], CONFIG.max_target).log_prob < NEAR.log_prob
        yield lambda source, target, **how: score_targets(session, [source], [target], **how)[0]


@pytest.fixture(scope="module")
def text_score(score):
    return lambda source, target: score(TOKENIZER.encode_source(source), TOKENIZER.encode_target(target))


def lines(text):
    return text.removesuffix("\n").split("\n")


def assert_row(row, expected):
    total, tokens, perplexity = row.split("\t")
    assert int(tokens) == len(expected.tokens)
    assert float(total) == pytest.approx(expected.total, rel=0, abs=NEAR.score(int(tokens)) + WRITTEN)
    assert float(perplexity) == pytest.approx(expected.perplexity, rel=NEAR.log_prob, abs=WRITTEN)


def test_lines_are_scored_in_their_order(cli, bundle, text_score, tmp_path):
    pairs = [("abcdefgh", "a"), ("a", "abcdefghij"), ("abc", ""), ("b", "ab"), ("😀é", "c c")] * 2
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\r\n" for source, target in pairs), encoding="utf-8")
    code, out, err = cli("score", bundle, "--input", path, "--batch", "3")
    expected = [text_score(*pair) for pair in pairs]
    assert code == 0
    for row, one in zip(lines(out), expected, strict=True):
        assert_row(row, one)
    total, tokens = sum(one.total for one in expected), sum(len(one.tokens) for one in expected)
    words = err.split()
    assert err.startswith(f"corpus: 10 lines, {tokens} tokens, log-probability ")
    assert float(words[-1]) == pytest.approx(math.exp(-total / tokens), rel=NEAR.log_prob, abs=WRITTEN)


def test_lines_that_cannot_be_scored_leave_the_others_alone(cli, bundle, stdin, text_score):
    long = "d" * 30
    stdin(f"abc\tab\n\nno tab\na\tb\tc\n \tab\nabc\t{long}\n{long}\tabc\n".encode() + b"a\xff\tb\nd\te\n")
    code, out, err = cli("score", bundle)
    assert code == 1
    first, *between, last = lines(out)
    assert between == [""] * 7
    assert_row(first, text_score("abc", "ab"))
    assert_row(last, text_score("d", "e"))
    assert lines(err)[:-1] == [
        "line 3: 1 columns, expected source<TAB>target",
        "line 4: 3 columns, expected source<TAB>target",
        "line 5: the source is empty",
        "line 6: the target has 31 tokens, at most 12 are supported; shorten it",
        "line 7: the source has 31 tokens, at most 16 are supported; shorten it",
        "line 8: byte 2 (0xff) is not UTF-8; save the input as UTF-8",
    ]
    assert lines(err)[-1].startswith("corpus: 2 lines, 5 tokens")


def test_unknown_characters_of_both_sides_are_reported_and_refused_if_strict(cli, bundle, stdin, text_score):
    data = "abc\tab\nabж\ta₿ж\n".encode()
    decoded = "line 2: 2 characters the model has no token for: 'ж', '₿'"
    stdin(data)
    code, out, err = cli("score", bundle)
    assert (code, lines(err)[0]) == (0, decoded)
    assert_row(lines(out)[1], text_score("abж", "a₿ж"))
    stdin(data)
    code, out, err = cli("score", bundle, "--strict", "--json")
    assert (code, lines(err)[0]) == (1, decoded)
    refused = json.loads(lines(out)[1])
    assert (refused["unknown"], "total" in refused) == (["ж", "₿"], False)
    assert lines(err)[-1].startswith("corpus: 1 lines")


def test_json_is_token_by_token(cli, bundle, stdin, text_score):
    stdin(b"abc\tab\n\nabc\n")
    code, out, _ = cli("score", bundle, "--json", "--backend", "torch")
    found = [json.loads(line) for line in lines(out)]
    expected = text_score("abc", "ab")
    assert code == 1
    assert [token["id"] for token in found[0]["tokens"]] == list(expected.tokens)
    assert [token["token"] for token in found[0]["tokens"]] == TOKENIZER.target_tokens(expected.tokens)
    assert [token["log_prob"] for token in found[0]["tokens"]] == pytest.approx(
        expected.log_probs, rel=0, abs=NEAR.log_prob
    )
    assert found[0]["total"] == pytest.approx(expected.total, rel=0, abs=NEAR.score(len(expected.tokens)))
    assert found[1:] == [{"line": 2, "tokens": []}, {"line": 3, "error": "1 columns, expected source<TAB>target"}]


def test_ids_are_taken_at_their_word(cli, bundle, stdin, score, tmp_path):
    plain = onnx_from_model(random_model(CONFIG, 3), tmp_path / "plain", ("fp32",)).root
    for argv in (["score", bundle, "--ids"], ["score", plain]):
        stdin(b"5 6\t7 8\n5\t\n5\tx\n5\t99\n")
        code, out, err = cli(*argv)
        assert code == 1
        assert_row(lines(out)[0], score([5, 6], [7, 8]))
        assert lines(err)[:-1] == [
            "line 2: the target is empty",
            "line 3: 'x' is not a token id, expected a line such as: 17 4 250",
            f"line 4: the target has token 99, but the vocabulary has 0 to {CONFIG.target_vocab - 1}",
        ]


def test_scores_of_outputs_are_those_of_run(cli, bundle, stdin):
    (best,) = json.loads(cli("run", bundle, "abc", "--json")[1])["hypotheses"]
    source, target = TOKENIZER.encode_source("abc"), best["tokens"]
    stdin(f"{' '.join(map(str, source))}\t{' '.join(map(str, target))}\n".encode())
    limit = NEAR.score(len(target)) + WRITTEN
    assert float(cli("score", bundle, "--ids")[1].split()[0]) == pytest.approx(best["score"], rel=0, abs=limit)


def test_the_models_own_first_tokens_count(cli, stdin, score, tmp_path):
    own = text_bundle(tmp_path, forced_bos=7, start=6).root
    stdin(b"abc\tab\n")
    code, out, _ = cli("score", own)
    assert code == 0
    expected = score(TOKENIZER.encode_source("abc"), [7, *TOKENIZER.encode_target("ab")], start=6)
    assert_row(out.removesuffix("\n"), expected)
    stdin(b"abc\tab\n")
    assert cli("score", own, "--to", "fra")[0] == 1


def test_nothing_to_score(cli, bundle, stdin, tmp_path):
    stdin(b"")
    assert cli("score", bundle) == (0, "", "corpus: nothing was scored\n")
    code, out, err = cli("score", bundle, "--batch", "0")
    assert (code, out, err) == (2, "", "error: --batch 0, expected at least 1\n")
    code, out, err = cli("score", bundle, "--input", tmp_path / "none.tsv")
    assert (code, out) == (1, "")
    assert err == f"error: cannot read {tmp_path / 'none.tsv'}: No such file or directory\n"


# --- flags of `run` ---------------------------------------------------------------------------------------------------


def decoded(cli, bundle, *flags):
    code, out, err = cli("run", bundle, "abc", "--json", *flags)
    assert (code, err) == (0, "")
    return [one["tokens"] for one in json.loads(out)["hypotheses"]]


def test_a_prefix_of_text_begins_every_output(cli, bundle):
    prefix = TOKENIZER.encode_target("fe")[:-1]
    (tokens,) = decoded(cli, bundle, "--prefix", "fe")
    assert tokens[:2] == prefix
    (again,) = json.loads(
        cli("run", bundle, " ".join(map(str, TOKENIZER.encode_source("abc"))), "--ids", "--json", "--prefix", "10 9")[1]
    )["hypotheses"]
    assert again["tokens"][:2] == [10, 9]
    (tokens,) = decoded(cli, bundle, "--prefix", "fe", "--forced-bos", "7")
    assert tokens[:3] == [7, *prefix]
    code, _, err = cli("run", bundle, "--ids", "5", "--prefix", f"5 {CONFIG.end_id}", "--banned", "5 99")
    assert code == 1
    assert err == (
        f"error: search options: token 99 asked for, but the vocabulary has 0 to {CONFIG.target_vocab - 1}; "
        f"the prefix has the end token {CONFIG.end_id}, expected it nowhere in a prefix\n"
    )


def test_tokens_that_may_not_be_output(cli, bundle, tmp_path):
    (free,) = decoded(cli, bundle, "--min-length", "6")
    (tokens,) = decoded(cli, bundle, "--first-banned", str(free[0]), "--min-length", "6")
    assert tokens[0] != free[0]
    flags = ["--banned", str(free[0]), "--banned", f"{free[1]} {free[2]}", "--min-length", "6"]
    (tokens,) = decoded(cli, bundle, *flags)
    assert free[0] not in tokens
    assert free[1:3] not in [tokens[i : i + 2] for i in range(len(tokens))]
    (tokens,) = decoded(cli, bundle, "--allowed", "5 6 7", "--forced-eos", str(CONFIG.end_id))
    assert set(tokens) <= {5, 6, 7, CONFIG.end_id}
    own = text_bundle(tmp_path, banned=[[free[0]]]).root
    (tokens,) = decoded(cli, own, "--banned", "5")
    assert free[0] not in tokens  # the model's own stays banned


def test_sampling(cli, bundle, tmp_path):
    flags = ["--sample", "--nbest", "4", "--temperature", "1.5", "--top-k", "9", "--top-p", "0.95", "--min-length", "5"]
    first = decoded(cli, bundle, *flags, "--seed", "3")
    assert len({tuple(tokens) for tokens in first}) == 4
    assert decoded(cli, bundle, *flags, "--seed", "3", "--backend", "torch") == first
    assert decoded(cli, bundle, *flags, "--seed", "4") != first
    own = text_bundle(tmp_path, beam=3).root
    assert decoded(cli, own, *flags, "--seed", "3") == first
    code, out, err = cli("run", own, "abc", "--sample", "--beam", "2", "--temperature", "0", "--top-p", "7")
    assert (code, out) == (2, "")
    assert err == (
        "error: search options: temperature 0.0, expected more than 0; top p 7.0, expected more than 0 and at most 1; "
        "beam 2 together with sample, expected beam 1 (nbest counts samples)\n"
    )


@pytest.mark.parametrize("argv", [["--banned", "x"], ["--allowed", ""], ["--to", "fra", "--forced-bos", "5"]])
def test_usage_errors(cli, bundle, argv):
    with pytest.raises(SystemExit) as exit_info:
        cli("run", bundle, "abc", *argv)
    assert exit_info.value.code == 2
