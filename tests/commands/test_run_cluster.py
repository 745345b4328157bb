"""`run --cluster` gives what `run` prints, whatever the flags. Workers run here; test_ray_data.py has Ray itself."""

from __future__ import annotations

import json
import pickle
import re
import shutil

import pytest
from huggingface_hub import constants
from support.hub_server import TOKEN, hub_of_this_process
from support.multilingual_bundle import multilingual_bundle
from support.text_bundle import text_bundle

import seq2engine
from seq2engine.runtime.cluster import ray_data
from seq2engine.runtime.cluster.ray_data import BlockWorker, Workers

TEXT = b"abc\n\ncab e\nzz unknown\ntoo long " + b"a" * 40 + b"\nbad \xff\nj\nab\ncd\n"


@pytest.fixture
def here(monkeypatch):
    """Workers in this process, which get all they know by pickle, as Ray's do. Gives the rows they were handed."""
    handed = []

    class Cluster:
        def __enter__(self):
            return self

        def __exit__(self, *rest):
            pass

        def nodes(self):
            return [{"Alive": True, "Resources": {"CPU": 4}}]

    def results(ray, open_decode, rows, workers):
        assert workers == Workers(1, 3)
        worker = BlockWorker(pickle.loads(pickle.dumps(open_decode)), 1)
        for row in reversed(rows):  # in any order
            handed.append(row)
            answer = worker(row)
            if answer["failure"]:
                raise seq2engine.Seq2EngineError(answer["failure"])
            yield answer

    monkeypatch.setattr(ray_data, "connected", lambda options: Cluster())
    monkeypatch.setattr(ray_data, "results", results)
    return handed


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("letters"), beam=2)


@pytest.fixture(scope="module")
def languages(tmp_path_factory):
    return multilingual_bundle(tmp_path_factory.mktemp("languages"))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "in.txt").write_bytes(TEXT)
    return tmp_path / "in.txt"


def both(cli, bundle, corpus, out, *flags):
    """Output and messages of `run`, and those of a cluster with its merged output; both exit codes."""
    alone = cli("run", bundle, "--input", corpus, "--quiet", *flags)
    code, printed, err = cli(
        "run", bundle, "--input", corpus, "--cluster", "local", "--out", out, "--keep-order", "--quiet", *flags
    )
    name = "output.jsonl" if "--json" in flags else "output.txt"
    assert printed.startswith(f"{out / name}: ")
    return alone, (code, (out / name).read_text(), err)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--beam", "4"),
        ("--beam", "4", "--nbest", "3"),
        ("--json", "--deterministic", "--batch", "2"),
        ("--json", "--nbest", "2", "--deterministic", "--batch", "2"),
        ("--beam", "1", "--sample", "--seed", "7", "--nbest", "2"),
        ("--truncate", "--strict"),
        ("--max-length", "4", "--scores", "--deterministic", "--batch", "2"),
        ("--ids",),
        ("--prefix", "ab"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("here")
def test_outputs_are_those_of_one_machine(cli, letters, corpus, tmp_path, flags):
    alone, cluster = both(cli, letters.root, corpus, tmp_path / "out", "--shard", "2", *flags)
    assert alone == cluster
    assert alone[0] == 1  # there are lines that cannot be decoded


@pytest.mark.usefixtures("here")
def test_languages(cli, languages, tmp_path):
    (tmp_path / "in.txt").write_text("the cat\na dog\n\nthe\n")
    flags = ("--from", "eng", "--to", "fra", "--beam", "2", "--shard", "3")
    alone, cluster = both(cli, languages.root, tmp_path / "in.txt", tmp_path / "out", *flags)
    assert alone == cluster
    assert alone[0] == 0
    code, _, err = cli(
        *("run", languages.root, "--input", tmp_path / "in.txt", "--cluster", "local", "--out", tmp_path / "two"),
        *("--to", "nothing", "--quiet"),
    )
    assert code == 1
    assert re.fullmatch(r"error: [^\n]*nothing[^\n]*\n", err)


@pytest.mark.usefixtures("here")
def test_prefixes_go_by_the_number_of_the_line(cli, letters, corpus, tmp_path):
    (tmp_path / "prefixes").write_text("a\nb\nc\nd\ne\nf\ng\nh\ni\n")
    flags = ("--prefixes", tmp_path / "prefixes", "--shard", "2")
    alone, cluster = both(cli, letters.root, corpus, tmp_path / "out", *flags)
    assert alone == cluster
    (tmp_path / "prefixes").write_text("a\n" * 12)
    argv = ("run", letters.root, "--input", corpus, "--cluster", "local", "--out", tmp_path / "two", "--quiet", *flags)
    assert "has 12 lines, but 9 were decoded" in cli(*argv)[2]


def test_a_job_goes_on_where_it_was_killed(cli, letters, corpus, tmp_path, here):
    out = tmp_path / "out"
    argv = ("run", letters.root, "--input", corpus, "--cluster", "local", "--out", out, "--shard", "2", "--quiet")
    code, printed, err = cli(*argv)
    assert (code, printed) == (1, f"{out}: 9 lines, 2 errors\n")
    assert not (out / "output.txt").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("shards/*/*.jsonl")}
    (lost, *_) = sorted(kept)
    lost.unlink()
    here.clear()
    code, printed, again = cli(*argv, "--keep-order")
    assert (code, printed, again) == (1, f"{out / 'output.txt'}: 9 lines, 7 of them before, 2 errors\n", err)
    assert [row["shard"] for row in here] == [str(lost)]
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items() if path != lost)
    assert (out / "output.txt").read_text() == cli("run", letters.root, "--input", corpus)[1]
    code, _, err = cli(*argv, "--beam", "3")
    assert code == 1
    assert "holds the output of another job (flags differ)" in err
    corpus.write_bytes(TEXT + b"x\n")
    assert "holds the output of another job (input differ)" in cli(*argv)[2]


@pytest.mark.usefixtures("here")
def test_folders_of_tsv_and_parquet(cli, letters, tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="comes with the extra `cluster`")
    import pyarrow.parquet as parquet

    texts = ["abc", "", "de f", "j"]
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.tsv").write_text("".join(f"{text}\tother\n" for text in texts[:2]))
    parquet.write_table(arrow.table({"text": texts[2:]}), folder / "b.parquet")
    out = tmp_path / "out"
    argv = ("run", letters.root, "--input", folder, "--cluster", "local", "--out", out, "--keep-order", "--quiet")
    assert cli(*argv)[0] == 0
    (tmp_path / "plain.txt").write_text("".join(f"{text}\n" for text in texts))
    assert (out / "output.txt").read_text() == cli("run", letters.root, "--input", tmp_path / "plain.txt")[1]


@pytest.mark.usefixtures("here")
def test_a_bundle_of_the_hub_goes_to_workers_by_its_commit(cli, letters, corpus, tmp_path, monkeypatch):
    """Other machines have not our cache: a worker downloads the very commit that the driver has seen."""
    monkeypatch.setattr("warnings.warn", lambda *words, **more: None)  # of the client's upload
    with hub_of_this_process(tmp_path / "caches", TOKEN):
        seq2engine.push_bundle(letters, "hf:me/letters")
        seen = []
        opened = seq2engine.open_bundle
        monkeypatch.setattr(
            "seq2engine.export.artifact.bundle.open_bundle", lambda name: seen.append(str(name)) or opened(name)
        )
        alone, cluster = both(cli, "hf:me/letters", corpus, tmp_path / "out")
        assert alone == cluster
        assert re.fullmatch(r"hf:me/letters@[0-9a-f]{40}", seen[-1])
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        shutil.rmtree(tmp_path / "out")
        assert both(cli, "hf:me/letters", corpus, tmp_path / "out")[1] == cluster


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--cluster", "local", "--out", "o"), "--cluster decodes files: give --input"),
        (("--cluster", "local", "--out", "o", "--input", "i", "text"), "give either TEXT or --input"),
        (("--cluster", "local", "--input", "i"), "give the folder for them with --out"),
        (("--cluster", "head", "--input", "i", "--out", "o"), "expected local, auto or HOST:PORT"),
        (("--cluster", "local", "--input", "i", "--out", "o", "--precision", "auto"), "name a precision"),
        (("--cluster", "local", "--input", "i", "--out", "o", "--cores", "0"), "--cores 0, expected at least 1"),
        (("--cluster", "local", "--input", "i", "--out", "o", "--shard", "0"), "--shard 0, expected at least 1"),
        (("--out", "o"), "--out without --cluster"),
        (("--keep-order", "--cores", "2", "--column", "2"), "--cores, --column, --keep-order without --cluster"),
    ],
)
def test_wrong_usage(cli, letters, capsys, flags, words):
    try:
        code, out, err = cli("run", letters.root, *flags)
    except SystemExit as ended:
        code, (out, err) = ended.code, capsys.readouterr()
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_nothing_to_read(cli, letters, tmp_path):
    argv = ("run", letters.root, "--cluster", "local", "--input", tmp_path / "no", "--out", tmp_path / "out")
    code, out, err = cli(*argv)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: .*holds no files of lines[^\n]*\n", err)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("here")
def test_shards_are_json(cli, letters, corpus, tmp_path):
    cli("run", letters.root, "--input", corpus, "--cluster", "local", "--out", tmp_path / "out", "--quiet")
    (path,) = (tmp_path / "out").glob("shards/*/*.jsonl")
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == list(range(1, 10))
