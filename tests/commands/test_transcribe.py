"""`seq2engine transcribe` as a user types it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile
from support.speech_models import WINDOW, sound, speech_model
from support.text_bundle import text_bundle

from seq2engine.runtime.speech.features import RATE
from seq2engine.runtime.translator import load

FAST = ("--threads", "1", "--temperatures", "0")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return speech_model(tmp_path_factory.mktemp("command")).bundle.root


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audio")
    paths = [folder / "one.wav", folder / "two.flac"]
    for seed, path in enumerate(paths):
        soundfile.write(path, sound(3 * WINDOW, seed), RATE, subtype="PCM_16")
    return paths


@pytest.fixture(scope="module")
def expected(bundle, files):
    with load(bundle, threads=1, attention=True) as model:
        return [model.transcribe(path, temperatures=(0.0,)) for path in files]


def test_text_in_the_order_of_the_files(cli, bundle, files, expected):
    code, out, err = cli("transcribe", bundle, files[0], "--quiet", *FAST, files[1])
    assert (code, err) == (0, "")
    assert out.splitlines() == [" ".join(one.text.split()) for one in expected]


def test_json_is_one_object_for_every_file(cli, bundle, files, expected):
    code, out, _ = cli("transcribe", bundle, *files, "--json", "--word-timestamps", *FAST)
    assert code == 0
    for line, path in zip(out.splitlines(), files, strict=True):
        values = json.loads(line)
        assert (values["file"], values["seconds"]) == (str(path), round(3 * WINDOW / RATE, 3))
        assert values["segments"]
        assert all(segment["words"] for segment in values["segments"])


@pytest.mark.parametrize("form", ["txt", "srt", "vtt", "json"])
def test_files_are_written_to_a_folder(cli, bundle, files, tmp_path, form):
    code, out, err = cli("transcribe", bundle, *files, "--format", form, "--out", tmp_path / "made", "--quiet", *FAST)
    assert (code, out, err) == (0, "", "")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [f"one.{form}", f"two.{form}"]
    assert (tmp_path / "made" / f"one.{form}").read_text().strip()


def test_progress_is_over_the_audio(cli, bundle, files):
    _, _, err = cli("transcribe", bundle, files[0], *FAST)
    assert "transcribe: done in" in err
    assert err.count("done in") == 1


def test_a_file_that_fails_leaves_the_others(cli, bundle, files, expected, tmp_path):
    text = tmp_path / "text.wav"
    text.write_text("no audio")
    code, out, err = cli("transcribe", bundle, text, files[0], tmp_path / "missing.wav", "--quiet", *FAST)
    assert code == 1
    assert out.splitlines() == ["", " ".join(expected[0].text.split()), ""]
    first, second = err.splitlines()
    assert first.startswith(f"{text} is not audio")
    assert second == f"cannot read {tmp_path / 'missing.wav'}: No such file or directory"


def test_bad_audio_is_one_line_or_an_empty_transcript(cli, bundle, tmp_path):
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, dtype=np.float32), RATE)
    soundfile.write(tmp_path / "silence.wav", np.zeros(5 * RATE, dtype=np.float32), RATE)
    soundfile.write(tmp_path / "nan.wav", np.full(100, np.nan, dtype=np.float32), RATE, subtype="FLOAT")
    code, out, err = cli(
        "transcribe", bundle, tmp_path / "empty.wav", tmp_path / "silence.wav", tmp_path / "nan.wav", "--quiet", *FAST
    )
    assert (code, out) == (1, "\n\n\n")
    assert err == f"{tmp_path / 'nan.wav'} has samples that are not finite numbers, expected numbers from -1 to 1\n"


def test_unusual_audio_is_transcribed(cli, bundle, tmp_path):
    """8 and 24 bits, six channels, a file that is cut off."""
    wave = sound(3 * WINDOW, 1)
    soundfile.write(tmp_path / "eight.wav", wave, RATE, subtype="PCM_U8")
    soundfile.write(tmp_path / "deep.wav", wave, RATE, subtype="PCM_24")
    soundfile.write(tmp_path / "surround.wav", np.stack([wave] * 6, axis=1), RATE)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "deep.wav").read_bytes()[: 3 * 2 * WINDOW])
    names = [tmp_path / f"{name}.wav" for name in ("eight", "deep", "surround", "cut")]
    code, out, err = cli("transcribe", bundle, *names, "--quiet", *FAST)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == len(names)
    assert all(line.strip() for line in out.splitlines())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "give at least one audio file"),
        (("a.wav", "b.wav", "--format", "srt"), "--out DIR"),
        (("x/a.wav", "y/a.wav", "--out", "z"), "two files named a"),
        (("a.wav", "--json", "--format", "srt"), "either --json or --format srt"),
        (("a.wav", "--temperatures", "hot"), "invalid numbers value"),
    ],
)
def test_wrong_usage_is_one_line(cli, capsys, bundle, words, problem):
    with pytest.raises(SystemExit, match="2"):
        cli("transcribe", bundle, *words)
    err = capsys.readouterr().err
    assert problem in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "problem", "code"),
    [
        (("a.wav", "--beam", "0"), "--beam 0, expected at least 1", 2),
        (("a.wav", "--best-of", "0"), "best of 0, expected at least 1", 2),
        (("a.wav", "--language", "de"), "knows English only", 1),
        (("a.wav", "--backend", "tensorrt", "--word-timestamps"), "no cross-attention weights", 2),
    ],
)
def test_options_that_cannot_work_are_one_line(cli, bundle, words, problem, code):
    found, out, err = cli("transcribe", bundle, *words, "--quiet", "--threads", "1")
    assert (found, out) == (code, "")
    assert problem in err
    assert len(err.splitlines()) == 1


def test_a_bundle_of_text_takes_no_audio(cli, files, tmp_path):
    root = text_bundle(tmp_path).root
    code, out, err = cli("transcribe", root, files[0], "--quiet", *FAST)
    assert (code, out) == (1, "")
    assert "takes no audio; give text to: seq2engine run" in err
    assert len(err.splitlines()) == 1
