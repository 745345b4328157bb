"""Checks of a command's options that need none of its files: all problems in one error, before any file is opened."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from seq2engine.errors import Seq2EngineError, UsageError

Check = Callable[[argparse.Namespace], Iterator[str]]  # the problems of some options

# Option -> its minimum, for the commands in which it is a number.
LEAST = {
    **dict.fromkeys(("batch", "beam", "cores", "count", "jobs", "max_length", "nbest", "profiles", "shard"), 1),
    **dict.fromkeys(("instances", "max_beams", "max_body", "queue", "slots", "threads"), 1),
    **dict.fromkeys(("min_length", "no_repeat_ngram", "row", "seed", "source_no_repeat_ngram", "top_k"), 0),
}
AUTO, CHOOSING = (
    "auto",
    ("run", "score", "serve", "transcribe", "read"),
)  # a precision that is chosen when a session is opened, and by which commands
SEARCHING = ("run", "read")
# Of these: reported with all other problems of a search, which the model's own options complete. Without a model they
# are reported alone (`check_usage_without_bundle`).
SEARCH = {"beam", "max_length", "min_length", "nbest", "no_repeat_ngram", "seed", "source_no_repeat_ngram", "top_k"}
RANGED = ("build", "package")  # commands whose sizes are ranges


def check_usage(args: argparse.Namespace) -> None:
    """Raises one error that lists every problem; rewrites GPU names to our spelling, such as sm89."""
    ours: tuple[Check, ...] = (numbers, serving, precisions, choices, sessions, ranges, exports, training)
    refuse(args, (benchmarks,) if args.command_name == "bench" else ours)
    if getattr(args, "gpu", None):
        from seq2engine.export.artifact.gpu_support import target_from_text

        args.gpu = [target_from_text(gpu) for gpu in args.gpu]


def check_usage_without_bundle(args: argparse.Namespace) -> None:
    """The checks that otherwise run with a bundle, for a command whose bundle cannot be opened."""
    if args.command_name in SEARCHING:
        refuse(args, (search_numbers,))


def refuse(args: argparse.Namespace, checks: Sequence[Check]) -> None:
    if problems := [problem for check in checks for problem in check(args)]:
        raise UsageError("; ".join(dict.fromkeys(problems)))


def numbers(args: argparse.Namespace) -> Iterator[str]:
    return problems_of_numbers(args, LEAST.keys() - SEARCH if args.command_name in SEARCHING else LEAST.keys())


def search_numbers(args: argparse.Namespace) -> Iterator[str]:
    return problems_of_numbers(args, SEARCH)


def problems_of_numbers(args: argparse.Namespace, options: Collection[str]) -> Iterator[str]:
    for option, least in LEAST.items():
        if option not in options:
            continue
        for value in given(args, option):
            if isinstance(value, int) and value < least:
                expected = f"at least {least}" if least else "0 or more"
                yield f"--{option.replace('_', '-')} {value}, expected {expected}"
    if "threads" in options:
        from seq2engine.runtime.backends import MOST_THREADS

        for value in given(args, "threads"):
            if isinstance(value, int) and value > MOST_THREADS:
                yield f"--threads {value}, expected at most {MOST_THREADS}"


def serving(args: argparse.Namespace) -> Iterator[str]:
    yield from (f"--timeout {value:g}, expected more than 0" for value in given(args, "timeout") if not value > 0)
    yield from (f"--port {port}, expected 0 to 65535" for port in given(args, "port") if not 0 <= port < 1 << 16)


def precisions(args: argparse.Namespace) -> Iterator[str]:
    from seq2engine.export.contract import PRECISIONS, check_choices
    from seq2engine.runtime.backends import QUANTISED

    cache = getattr(args, "cache_form", "static")
    yield from problem(partial(check_choices, "fp32", cache))
    for precision in (*given(args, "precision"), *given(args, "add")):
        if precision == AUTO and args.command_name in CHOOSING:
            continue
        yield from problem(partial(check_choices, precision, cache))
    for draft in given(args, "draft"):
        if draft not in (AUTO, QUANTISED, *PRECISIONS):
            yield f"unknown draft {draft!r}, expected one of {', '.join((QUANTISED, *PRECISIONS))}"


def choices(args: argparse.Namespace) -> Iterator[str]:
    if given(args, "flavour"):
        from seq2engine.common.tensorrt_module import FLAVOURS

        yield from unknown("TensorRT flavour", given(args, "flavour"), FLAVOURS)
    if given(args, "metrics"):
        from seq2engine.runtime.quality.intervals import METRICS

        yield from unknown("metric", given(args, "metrics"), METRICS)
    if given(args, "provider"):
        from seq2engine.runtime.ort.providers import PROVIDERS

        yield from unknown("provider", given(args, "provider"), PROVIDERS)


def sessions(args: argparse.Namespace) -> Iterator[str]:
    """Of commands that open a session on a backend."""
    if "backend" not in args:
        return
    from seq2engine.runtime.backends import SessionOptions, check_session

    for backend in given(args, "backend"):
        attention = any(getattr(args, name, None) for name in ("alignments", "coverage_penalty", "words"))
        options = SessionOptions(
            backend,
            engine=args.engine,
            attention=attention,
            deterministic=args.deterministic,
            provider=args.provider,
            draft=getattr(args, "draft", None),
        )
        yield from problem(partial(check_session, options))


def ranges(args: argparse.Namespace) -> Iterator[str]:
    if args.command_name in RANGED:
        from seq2engine.commands.build import RANGES
        from seq2engine.export.artifact.profiles import rising_range

        for option in RANGES:
            for text in given(args, option):
                yield from problem(partial(rising_range, text, option.replace("_", "-")))
    if given(args, "workspace"):
        from seq2engine.export.artifact.build_flags import bytes_from_text

        yield from problem(partial(bytes_from_text, args.workspace))


def benchmarks(args: argparse.Namespace) -> Iterator[str]:
    from seq2engine.commands.bench import bench_usage

    yield from bench_usage(args)


def exports(args: argparse.Namespace) -> Iterator[str]:
    adds = args.command_name == "export" and args.add is not None
    if adds and (args.bundle is not None or args.precision is not None or args.force):
        yield "--add takes a bundle and nothing else to export: export --add int8 BUNDLE"


def training(args: argparse.Namespace) -> Iterator[str]:
    if args.command_name != "train":
        return
    import dataclasses

    from seq2engine.model.config import ModelConfig
    from seq2engine.model.training.loop import TrainOptions
    from seq2engine.model.training.text import DEFAULTS

    values = {name: value for name, value in vars(args).items() if value is not None}
    fields = [field.name for field in dataclasses.fields(TrainOptions)]
    sizes = {**DEFAULTS, **{name: values[name] for name in DEFAULTS if name in values}}
    yield from problem(lambda: TrainOptions(**{name: values[name] for name in fields if name in values}))
    yield from problem(lambda: ModelConfig(**sizes, source_vocab=100, target_vocab=100))  # as good as any


def given(args: argparse.Namespace, option: str) -> list[Any]:
    """The values of an option, none where it was not given or the command has no such option."""
    value = getattr(args, option, None)
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def unknown(what: str, values: list[Any], known: Any) -> Iterator[str]:
    for value in values:
        if value not in known:
            yield f"unknown {what} {value!r}, expected one of {', '.join(known)}"


def problem(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except Seq2EngineError as error:
        yield str(error)
