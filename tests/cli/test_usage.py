"""Wrong usage is exit code 2 and one line, before any file is opened: none of the paths here is there."""

from __future__ import annotations

import pytest

from seq2engine.cli.main import make_parser, parsed
from seq2engine.cli.usage import CHOOSING, check_usage
from seq2engine.errors import ConfigError, UsageError
from seq2engine.runtime.search.options import options_from_values

SCALARS = [  # command, option, value, the message
    ("run B 5", "--batch", "0", "--batch 0, expected at least 1"),
    ("run B 5", "--threads", "0", "expected at least 1"),
    ("run B 5", "--backend", "tourch", "unknown backend 'tourch', expected one of torch, onnxruntime, tensorrt"),
    ("run B 5", "--precision", "fp61", "unknown precision 'fp61', expected one of fp32, fp16"),
    ("run B 5", "--draft", "fp61", "unknown draft 'fp61', expected one of quantised, fp32, fp16"),
    ("run B 5", "--provider", "cdua", "unknown provider 'cdua', expected one of cpu, cuda"),
    ("run B 5", "--beam", "0", "error: --beam 0, expected at least 1"),
    ("run B 5", "--nbest", "0", "error: --nbest 0, expected at least 1"),
    ("run B 5", "--min-length", "-1", "error: --min-length -1, expected 0 or more"),
    ("bench B", "--beam", "0", "error: --beam 0, expected at least 1"),
    ("bench B", "--neighbour", "-1", "neighbours -1, expected 0 or more"),
    ("bench B", "--natural", "1x1", "--natural without --references, whose sources it decodes"),
    ("bench B", "--rounds", "0", "error: rounds 0, expected at least 1"),
    ("bench B", "--backend", "tourch", "backend 'tourch', expected one of torch, onnxruntime, tensorrt"),
    ("bench B", "--precision", "fp61", "precision 'fp61', expected one of fp32, fp16"),
    ("bench B", "--scenario", "foo", "unknown scenario foo, expected some of single, offline, server"),
    ("run B 5", "--engine", "x", "an engine is an option of tensorrt, not of onnxruntime"),
    ("score B", "--batch", "-3", "--batch -3, expected at least 1"),
    ("parity B", "--count", "-1", "--count -1, expected at least 1"),
    ("parity B", "--metrics", "rouge", "unknown metric 'rouge', expected one of errors, bleu, chrf"),
    ("parity B", "--row", "-1", "--row -1, expected 0 or more"),
    ("attention B 5", "--beam", "0", "--beam 0, expected at least 1"),
    ("plan C B", "--profiles", "0", "--profiles 0, expected at least 1"),
    ("build B", "--jobs", "0", "--jobs 0, expected at least 1"),
    ("build B", "--batch", "1:2", "--batch '1:2' is not a range"),
    ("build B", "--beam", "3:2:1", "beam 3:2:1, expected a number of at least 1, or rising numbers such as 1:8:64"),
    ("build B", "--workspace", "1T", "--workspace '1T' is not a size"),
    ("build B", "--flavour", "trt", "unknown TensorRT flavour 'trt', expected one of tensorrt, tensorrt_rtx"),
    ("build B", "--slots", "0", "--slots 0, expected at least 1"),
    ("package B P", "--max-length", "x", "--max-length 'x' is not a range"),
    (
        "export random:tiny B",
        "--cache-form",
        "elastic",
        "unknown cache form 'elastic', expected one of static, growing",
    ),
    ("serve B", "--queue", "0", "error: --queue 0, expected at least 1"),
    ("serve B", "--max-body", "0", "error: --max-body 0, expected at least 1"),
    ("serve B", "--timeout", "0", "error: --timeout 0, expected more than 0"),
    ("serve B", "--port", "65536", "error: --port 65536, expected 0 to 65535"),
    ("triton B R", "--instances", "0", "error: --instances 0, expected at least 1"),
    ("triton B R", "--timeout", "nan", "error: --timeout nan, expected more than 0"),
    ("triton B R", "--precision", "auto", "unknown precision 'auto', expected one of fp32, fp16"),
    ("train D C --dev D", "--epochs", "0", "epochs 0, expected more than 0"),
    ("train D C --dev D", "--norm", "mid", "norm is 'mid', expected one of"),
    ("train D C --dev D", "--threads", "0", "--threads 0, expected at least 1"),
]


def test_help_names_auto_where_it_is_taken():
    commands = make_parser()._subparsers._group_actions[0].choices
    explained = [
        name
        for name, parser in commands.items()
        if any(action.dest == "precision" and "auto: " in action.help for action in parser._actions)
    ]
    assert set(explained) == set(CHOOSING)


@pytest.mark.parametrize(("command", "option", "value", "reason"), SCALARS)
def test_a_value_that_never_works(cli, tmp_path, monkeypatch, command, option, value, reason):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*command.split(), f"{option}={value}", "--quiet")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert reason in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("run B 5 --backend torch --provider cuda", "a provider is an option of onnxruntime, not of torch"),
        ("run B 5 --draft w8a8 --deterministic", "speculative decoding is for onnxruntime on the CPU"),
        ("run B 5 --draft w8a8 --alignments", "speculative decoding is for onnxruntime on the CPU"),
        ("run B 5 --backend tensorrt --alignments", "backend tensorrt has no cross-attention weights"),
        ("parity B --backend tensorrt --provider cuda", "a provider is an option of onnxruntime, not of tensorrt"),
    ],
)
def test_options_that_never_go_together(cli, line, reason):
    code, _, err = cli(*line.split())
    assert code == 2
    assert reason in err


def test_all_problems_are_reported_together(cli):
    code, _, err = cli("parity", "B", "--beam", "0", "--count", "0", "--backend", "tourch", "--precision", "fp61")
    assert code == 2
    assert [part.split()[0:2] for part in err.removeprefix("error: ").split("; ")] == [
        ["--beam", "0,"],
        ["--count", "0,"],
        ["unknown", "precision"],
        ["unknown", "backend"],
    ]


def test_threads_are_a_number_or_auto(capsys):
    with pytest.raises(SystemExit):
        parsed(["run", "B", "5", "--threads", "some"])
    assert "'some', expected a number or auto" in capsys.readouterr().err


def test_what_works_passes():
    for line in (
        "run B 5 --beam 4 --nbest 4 --threads auto --draft none",
        "run B 5 --draft auto",
        "run B 5 --draft quantised",
        "run B 5 --draft quantized",
        "bench B --beam 1 4",
        "build B --batch 1:2:4 --gpu 8.9 SM_120",
    ):
        args = parsed(line.split())
        check_usage(args)
    assert args.gpu == ["sm89", "sm120"]


def test_search_options_of_the_user_are_usage_and_those_of_the_model_are_not():
    with pytest.raises(UsageError, match="nbest 3, expected 1 to the beam size 2"):
        options_from_values({"beam": 2}, 10, "generation.json", nbest=3)
    with pytest.raises(ConfigError, match="nbest 3, expected 1 to the beam size 2") as caught:
        options_from_values({"beam": 2, "nbest": 3}, 10, "generation.json")
    assert not isinstance(caught.value, UsageError)
    with pytest.raises(ConfigError, match="too long") as caught:
        options_from_values({}, 10, "generation.json", lambda options: ["too long"], beam=2)
    assert not isinstance(caught.value, UsageError)
