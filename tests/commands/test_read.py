"""`seq2engine read` as a user types it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from support.text_bundle import text_bundle
from support.trocr_models import pictures, saved_trocr, small_trocr

from seq2engine.exporting import export_checkpoint
from seq2engine.runtime.translator import load

FAST = ("--threads", "1")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("read")
    saved_trocr(small_trocr(8), folder / "theirs")
    return export_checkpoint(folder / "theirs", folder / "bundle", precisions=("fp32", "w8a8")).root


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / name for name in ("one.png", "two.bmp", "three.tif")]
    for path, picture in zip(paths, pictures(3), strict=True):
        Image.fromarray(picture).save(path)
    return paths


@pytest.fixture(scope="module")
def expected(bundle, files):
    with load(bundle, precision="fp32", threads=1) as model:
        return model.read(files)


def test_a_line_for_every_file_in_their_order(cli, bundle, files, expected):
    code, out, err = cli("read", bundle, files[0], "--quiet", *FAST, "--precision", "fp32", *files[1:])
    assert (code, err) == (0, "")
    assert out.splitlines() == expected


@pytest.mark.parametrize("flags", [("--json",), ("--format", "json"), ("--json", "--format", "json")])
def test_json_is_one_object_for_every_file(cli, bundle, files, expected, flags):
    code, out, _ = cli("read", bundle, *files, *flags, "--nbest", "2", "--beam", "2", *FAST)
    assert code == 0
    for line, path in zip(out.splitlines(), files, strict=True):
        values = json.loads(line)
        assert values["file"] == str(path)
        assert [sorted(one) for one in values["hypotheses"]] == [["log_probs", "score", "text", "tokens"]] * 2


def test_what_cannot_be_read_is_reported_and_leaves_an_empty_line(cli, bundle, files, expected, tmp_path):
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "short.png").write_bytes(files[0].read_bytes()[:200])
    bad = [tmp_path / name for name in ("no.png", "text.png", "empty.png", "short.png")]
    code, out, err = cli("read", bundle, bad[0], files[0], *bad[1:], files[1], "--quiet", *FAST)
    assert code == 1
    assert out.splitlines() == ["", expected[0], "", "", "", expected[1]]
    assert len(err.splitlines()) == 4
    assert all(str(path) in line for path, line in zip(bad, err.splitlines(), strict=True))
    code, out, _ = cli("read", bundle, bad[0], "--quiet", "--json", *FAST)
    assert code == 1
    assert json.loads(out) == {"file": str(bad[0]), "error": f"cannot read {bad[0]}: No such file or directory"}


def test_odd_pictures_give_text(cli, bundle, tmp_path):
    odd = {
        "one.png": np.zeros((1, 1), np.uint8),
        "gray.png": pictures(1)[0][:, :, 0],
        "alpha.png": np.dstack([pictures(1)[0], np.full(pictures(1)[0].shape[:2], 128, np.uint8)]),
        "deep.png": pictures(1)[0][:, :, 0].astype(np.uint16) * 257,
        "long.png": np.zeros((2, 3000), np.uint8),
    }
    for name, array in odd.items():
        Image.fromarray(array).save(tmp_path / name)
    Image.fromarray(pictures(1)[0]).convert("P").save(tmp_path / "palette.png")
    code, out, err = cli("read", bundle, *(tmp_path / name for name in (*odd, "palette.png")), "--quiet", *FAST)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 6


def test_progress_is_shown_for_many_files(cli, bundle, files):
    code, _, err = cli("read", bundle, *files, "--batch", "2", *FAST)
    assert code == 0
    assert "3 of 3 pictures" in err
    assert "pictures" not in cli("read", bundle, *files, *FAST)[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give at least one image file"),
        (["a.png", "--json", "--format", "txt"], "give either --json or --format txt, not both"),
        (["a.png", "--format", "srt"], "invalid choice"),
    ],
)
def test_usage_errors(cli, bundle, words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli("read", bundle, *words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_batch_has_at_least_one_file(cli, bundle):
    assert cli("read", bundle, "a.png", "--batch", "0") == (2, "", "error: --batch 0, expected at least 1\n")


def test_a_model_of_text_names_its_own_command(cli, tmp_path):
    root = text_bundle(tmp_path).root
    code, _, err = cli("read", root, "a.png")
    assert code == 1
    assert err == f"error: {root} takes text, no images; use: seq2engine run {root} TEXT\n"


@pytest.mark.parametrize(
    "flags",
    [
        ("--draft", "w8a8", "--precision", "fp32"),
        ("--deterministic", "--precision", "fp32"),
        ("--backend", "torch", "--precision", "fp32"),
        ("--alignments", "--precision", "fp32"),
    ],
)
def test_kinds_of_sessions_give_the_same_text(cli, bundle, files, expected, flags):
    code, out, err = cli("read", bundle, *files, "--quiet", *flags, *FAST)
    assert (code, err) == (0, "")
    assert [line.partition("\t")[0] for line in out.splitlines()] == expected


def test_prefixes_are_one_for_each_file(cli, bundle, files, tmp_path):
    (tmp_path / "prefixes.txt").write_text("ab\ncd\nef\n")
    code, out, _ = cli("read", bundle, *files, "--quiet", "--prefixes", tmp_path / "prefixes.txt", *FAST)
    assert code == 0
    assert [line[:2] for line in out.splitlines()] == ["ab", "cd", "ef"]
    code, _, err = cli("read", bundle, files[0], "--quiet", "--prefixes", tmp_path / "prefixes.txt", *FAST)
    assert code == 1
    assert "has 3 lines, but 1 were decoded" in err
