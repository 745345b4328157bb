"""`seq2engine run` as a user types it: text in, text out, one line for one line, whatever is in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from support.text_bundle import CONFIG, TOKENIZER, text_bundle

from seq2engine.commands import run as cli_run
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from seq2engine.runtime.translator import load


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("run")).root


@pytest.fixture(scope="module")
def decoded(bundle):
    """The model's output for a text that fits."""
    with load(bundle, threads=1) as model:
        yield lambda text: model.translate(text)


def lines(text):
    return text.removesuffix("\n").split("\n")


def test_text_in_text_out(cli, bundle, stdin, decoded):
    stdin("abc\r\n\n😀é\u2028a\nno\x0cab\u0085c\n \nhij".encode())
    code, out, err = cli("run", bundle)
    assert code == 0
    assert lines(err) == [r"line 4: 4 characters the model has no token for: 'n', 'o', '\x0c', '\x85'"]
    assert lines(out) == [
        decoded("abc"),
        "",
        decoded("😀é\u2028a"),
        decoded("no\x0cab\u0085c"),
        "",
        decoded("hij"),
    ]
    assert len(set(lines(out))) == 5


def test_a_byte_order_mark_and_nul_are_harmless(cli, bundle, stdin, decoded):
    stdin(b"\xef\xbb\xbfabc\na\0b\n")
    unknown = r"line 2: 1 character the model has no token for: '\x00'"
    assert cli("run", bundle) == (0, f"{decoded('abc')}\n{decoded(chr(0).join('ab'))}\n", f"{unknown}\n")


def test_lines_that_cannot_be_decoded_leave_the_others_alone(cli, bundle, stdin, decoded):
    data = b"abc\nab\xff\n" + b"d" * 10_000 + b"\nefg\n"
    stdin(data)
    code, out, err = cli("run", bundle)
    assert code == 1
    assert lines(out) == [decoded("abc"), "", "", decoded("efg")]
    assert lines(err) == [
        "line 2: byte 3 (0xff) is not UTF-8; save the input as UTF-8",
        "line 3: 10,001 tokens, at most 16 are supported; shorten it or add --truncate",
    ]
    stdin(data)
    code, out, err = cli("run", bundle, "--truncate")
    assert code == 1
    assert lines(out) == [decoded("abc"), "", decoded("d" * 15), decoded("efg")]
    assert len(lines(err)) == 1
    stdin(b"d" * 10_000)
    assert cli("run", bundle, "--truncate") == (0, decoded("d" * 15) + "\n", "")


@pytest.mark.parametrize("truncate", [(), ("--truncate",)])
def test_unknown_characters_are_reported_once_per_line_and_refused_if_strict(cli, bundle, stdin, decoded, truncate):
    data = "abc\nжaж₿b\n\nabж\n".encode()
    found = [
        "line 2: 2 characters the model has no token for: 'ж', '₿'",
        "line 4: 1 character the model has no token for: 'ж'",
    ]
    stdin(data)
    code, out, err = cli("run", bundle, *truncate)
    assert (code, lines(err)) == (0, found)
    assert lines(out) == [decoded("abc"), decoded("жaж₿b"), "", decoded("abж")]
    stdin(data)
    code, out, err = cli("run", bundle, "--strict", *truncate)
    assert (code, lines(err)) == (1, found)
    assert lines(out) == [decoded("abc"), "", "", ""]


def test_unknown_characters_in_json(cli, bundle, stdin):
    stdin("abc\nжa₿\n".encode())
    code, out, _ = cli("run", bundle, "--json")
    known, unknown = map(json.loads, lines(out))
    assert code == 0
    assert "unknown" not in known
    assert unknown["unknown"] == ["ж", "₿"]
    assert len(unknown["hypotheses"]) == 1
    stdin("abc\nжa₿\n".encode())
    code, out, _ = cli("run", bundle, "--json", "--strict")
    refused = json.loads(lines(out)[1])
    assert (code, refused["unknown"]) == (1, ["ж", "₿"])
    assert "no token for" in refused["error"]


def test_ids_are_never_unknown(cli, bundle, stdin):
    stdin(b"5 6 7\n")
    code, _, err = cli("run", bundle, "--ids", "--strict")
    assert (code, err) == (0, "")


def test_empty_input(cli, bundle, stdin):
    stdin(b"")
    assert cli("run", bundle) == (0, "", "")
    stdin(b"\n")
    assert cli("run", bundle) == (0, "\n", "")


def test_texts_as_arguments(cli, bundle, decoded, tmp_path):
    both = f"{decoded('abc')}\n{decoded('de')}\n"
    assert cli("run", bundle, "abc", "de") == (0, both, "")
    assert cli("run", bundle, "--batch", "4", "abc", "de") == (0, both, "")
    assert cli("run", bundle, "abc", "--batch", "4", "de") == (0, both, "")
    assert cli("run", bundle, "--batch", "4", "--", "-de")[:2] == (0, f"{decoded('-de')}\n")
    assert cli("run", bundle, "") == (0, "\n", "")
    code, out, err = cli("run", bundle, "ab\udcff")  # as Python gives a byte that is no UTF-8
    assert (code, out) == (1, "\n")
    assert "line 1: byte 3 (0xff)" in err


@pytest.mark.parametrize("argv", [["a", "--input", "file"], ["--input", "file", "a"], ["a", "--explode", "b"]])
def test_usage_errors(cli, bundle, argv):
    with pytest.raises(SystemExit) as exit_info:
        cli("run", bundle, *argv)
    assert exit_info.value.code == 2


def test_a_file_in_its_own_order(cli, bundle, tmp_path, decoded):
    texts = ["abcdefgh", "a", "abc", "bcdefgh", "b", ""] * 3
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    code, out, err = cli("run", bundle, "--input", tmp_path / "in.txt", "--batch", "4")
    assert (code, err) == (0, "")
    assert lines(out) == [decoded(text) for text in texts]
    code, out, err = cli("run", bundle, "--input", tmp_path / "none.txt")
    assert (code, out) == (1, "")
    assert err == f"error: cannot read {tmp_path / 'none.txt'}: No such file or directory\n"
    assert cli("run", bundle, "--input", tmp_path)[0] == 1


def test_progress_of_a_large_file(cli, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(cli_run, "LARGE", 4)
    (tmp_path / "in.txt").write_text("abc\nd\n")
    _, out, err = cli("run", bundle, "--input", tmp_path / "in.txt")
    assert lines(err)[0] == "decode ..."
    assert lines(err)[-1].startswith("decode: done in")
    assert cli("run", bundle, "--input", tmp_path / "in.txt", "--quiet") == (0, out, "")


def test_json(cli, bundle, stdin, decoded):
    stdin("abc\n\n\xe9\n".encode() + b"\xff\n")
    code, out, _ = cli("run", bundle, "--json", "--beam", "3", "--nbest", "2")
    found = [json.loads(line) for line in lines(out)]
    assert code == 1
    assert [one["line"] for one in found] == [1, 2, 3, 4]
    assert [one.get("text") for one in found] == ["abc", "", "é", None]
    assert found[1]["hypotheses"] == []
    assert found[3]["error"].startswith("byte 1")
    best, second = found[0]["hypotheses"]
    assert best["score"] >= second["score"]
    assert best["text"] == TOKENIZER.decode_target(best["tokens"])


def test_nbest_is_as_many_lines_for_every_input(cli, bundle, stdin, decoded):
    stdin(b"abc\n\n\xff\nd\n")
    code, out, _ = cli("run", bundle, "--beam", "3", "--nbest", "3")
    assert code == 1
    assert len(lines(out)) == 12
    assert lines(out)[3:9] == [""] * 6
    stdin(b"abc\n")
    best = json.loads(cli("run", bundle, "--beam", "3", "--nbest", "3", "--json")[1])["hypotheses"]
    assert lines(out)[:3] == [one["text"] for one in best]


def test_ids(cli, bundle, stdin):
    ids = " ".join(map(str, TOKENIZER.encode_source("abc")))
    stdin(f"{ids}\n\nabc\n5 99\n".encode())
    code, out, err = cli("run", bundle, "--ids")
    assert code == 1
    tokens = [int(word) for word in lines(out)[0].split()]
    stdin(b"abc\n")
    (best,) = json.loads(cli("run", bundle, "--json")[1])["hypotheses"]
    assert best["tokens"] == tokens
    assert lines(out)[1:] == ["", "", ""]
    assert lines(err) == [
        "line 3: 'abc' is not a token id, expected a line such as: 17 4 250",
        f"line 4: token 99, but the vocabulary has 0 to {CONFIG.source_vocab - 1}",
    ]
    found = json.loads(cli("run", bundle, "--ids", "--json", ids)[1])
    assert found["tokens"] == TOKENIZER.encode_source("abc")
    assert found["hypotheses"] == [{name: best[name] for name in ("tokens", "score", "log_probs")}]


def test_a_bundle_without_a_tokenizer_takes_ids(cli, tmp_path, bundle):
    plain = onnx_from_model(random_model(CONFIG, 3), tmp_path / "plain", ("fp32",)).root
    assert cli("run", plain, "5 6 2") == cli("run", bundle, "--ids", "5 6 2")
    code, _, err = cli("run", plain, "abc")
    assert code == 1
    assert "'abc' is not a token id" in err


def test_the_models_own_way_of_decoding_comes_first(cli, tmp_path):
    own = text_bundle(tmp_path, beam=3, nbest=2, max_length=4, min_length=2, length_penalty=0.5).root

    def tokens(*flags):
        found = json.loads(cli("run", own, "abc", "--json", *flags)[1])
        return [tuple(one["tokens"]) for one in found["hypotheses"]]

    with open_session(own, threads=1) as session:
        from seq2engine.runtime.generate import generate

        def expected(**options):
            merged = {"beam": 3, "nbest": 2, "max_length": 4, "min_length": 2, "length_penalty": 0.5, **options}
            return [
                best.tokens for best in generate(session, [TOKENIZER.encode_source("abc")], SearchOptions(**merged))[0]
            ]

        assert tokens() == expected()
        assert tokens("--beam", "1", "--nbest", "1", "--max-length", "7") == expected(beam=1, nbest=1, max_length=7)
        assert tokens("--min-length", "4", "--no-repeat-ngram", "1", "--early-stopping", "never") == expected(
            min_length=4, no_repeat_ngram=1, early_stopping="never"
        )
        assert tokens("--length-penalty", "-2") == expected(length_penalty=-2.0)
        assert tokens("--max-length", "1") == expected(max_length=1, min_length=1) != [(CONFIG.end_id,)]
        assert tokens("--beam-style", "ctranslate2") == expected(beam_style="ctranslate2")


def test_a_beam_style_that_does_not_exist(cli, bundle):
    code, out, err = cli("run", bundle, "abc", "--beam-style", "moses")
    assert (code, out) == (2, "")
    assert err.startswith("error: search options: beam style 'moses', expected one of huggingface, ctranslate2")


@pytest.mark.parametrize("flag", ["--from", "--to"])
def test_a_language_the_model_does_not_have(cli, bundle, flag):
    code, out, err = cli("run", bundle, "abc", flag, "fra")
    assert (code, out) == (1, "")
    assert err == "error: language 'fra' asked for, but this model's tokenizer has no languages\n"
    assert "token ids have none" in cli("run", bundle, "--ids", "5", flag, "fra")[2]


def test_the_target_language_is_the_first_token(cli, bundle, monkeypatch):
    monkeypatch.setattr(type(TOKENIZER), "language_id", lambda self, language: {"fra": 7}[language])
    (best,) = json.loads(cli("run", bundle, "abc", "--to", "fra", "--json")[1])["hypotheses"]
    assert best["tokens"][0] == 7


# --- as a process -----------------------------------------------------------------------------------------------------


def started(bundle, *argv, **options):
    # A shell that starts the tests in the background has set its children to ignore the interrupt.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, "-m", "seq2engine", "run", str(bundle), *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed,
        **options,
    )


def test_every_line_is_answered_before_the_next_is_sent_and_an_interrupt_ends_it(bundle, decoded):
    process = started(bundle, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    for text in ("abc", "", "d"):
        process.stdin.write(f"{text}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline().decode() == f"{decoded(text)}\n"
    os.kill(process.pid, signal.SIGINT)  # while it waits for a line
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert out == b""
    assert err.decode().startswith("interrupted")
    assert len(err.splitlines()) == 1


def test_output_is_utf_8_whatever_the_locale(bundle, decoded):
    env = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    out, err = started(bundle, "--json", env=env).communicate("😀\n".encode(), timeout=600)
    assert err == b""
    assert json.loads(out.decode())["text"] == "😀"
    assert "😀" in out.decode()


def test_a_closed_standard_input_is_one_line(bundle):
    command = f"{sys.executable} -m seq2engine run {bundle} <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: standard input is closed; give TEXT or --input FILE\n"
