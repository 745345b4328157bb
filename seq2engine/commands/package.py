"""`seq2engine package` and `push`: a bundle for a GPU machine without seq2engine, and for the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from seq2engine.commands.build import OLD_RANGES, RANGES, profiles_from_args
from seq2engine.flags.shared import Commands, add_bundle, add_command, add_json, add_threads, progress_for


def add_parser(commands: Commands) -> None:
    summary = "make a folder that a GPU machine can verify with TensorRT and numpy alone"
    sub = add_command(commands, "package", run_package, summary, renamed=OLD_RANGES)
    add_bundle(sub)
    add_package_flags(sub)
    add_json(sub)
    summary = "upload a bundle to the Hugging Face hub, with a model card made of its reports"
    sub = add_command(commands, "push", run_push, summary)
    add_bundle(sub)
    add_push_flags(sub)
    add_json(sub)


def add_package_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--precision", help="which graphs (default: those of the engine, or what `build` would choose)")
    parser.add_argument("--engine", help="which engine to include, if the bundle has several of a precision")
    for name, (_, what) in RANGES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            nargs=1,
            metavar="RANGE",
            help=f"{what}, for build.py: one number, or min:opt:max",
        )
    parser.add_argument("--slots", type=int, help="slots of a static cache (default: enough for every request)")
    parser.add_argument("--texts", type=Path, help="file of lines that run_all.py decodes (default: random sources)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample sources (default: %(default)s)")
    add_threads(parser, "all cores")
    parser.add_argument("--force", action="store_true", help="replace an existing package")


def run_package(args: argparse.Namespace) -> int:
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.artifact.default_precision import default_precision

    bundle = open_bundle(args.bundle)
    precision = args.precision or default_precision(bundle, "tensorrt", args.engine)
    bundle.check_graphs(precision)  # before PyTorch is imported and anything recorded
    from seq2engine.packaging.package import PackageOptions, package_from_bundle

    named = any(getattr(args, name) is not None for name in RANGES)
    options = PackageOptions(
        precision=precision,
        engine=args.engine,
        ranges=profiles_from_args(args, bundle, precision)[0] if named else None,
        slots=args.slots,
        texts=() if args.texts is None else texts_from_file(args.texts),
        seed=args.seed,
        threads=args.threads,
    )
    result = package_from_bundle(bundle, args.out, options, args.force, progress_for(args))
    if args.json:
        print(result.to_json())
        return 0
    print(
        f"{result.folder}: {result.precision}, {result.megabytes} MB, {result.checks} checks, engines: {result.engines}"
    )
    print("next, on the GPU machine: pip install -r requirements.txt && python run_all.py")
    return 0


def add_push_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="hf:OWNER/NAME; the token is that of HF_TOKEN or `hf auth login`")
    parser.add_argument("--private", action="store_true", help="create the repository as private, if it does not exist")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to write to (default: main)")
    parser.add_argument(
        "--dry-run", action="store_true", help="upload nothing; write the model card to README.md in the bundle"
    )


def run_push(args: argparse.Namespace) -> int:
    from seq2engine.packaging.push import CARD, PushOptions, push_bundle

    options = PushOptions(private=args.private, revision=args.revision, dry_run=args.dry_run)
    result = push_bundle(args.bundle, args.name, options, progress_for(args))
    if args.json:
        print(result.to_json())
        return 0
    what = f"{len(result.files)} files, {result.bytes / 1e6:.1f} MB"
    if result.commit is None:
        print(f"{args.bundle / CARD}: the card; {what} would go to {result.name}")
    else:
        print(f"{result.name}: {what}, commit {result.commit}\n{result.url}")
    return 0


def texts_from_file(path: Path) -> list[str]:
    from seq2engine.errors import RequestError
    from seq2engine.runtime.text.lines import lines_from_chunks

    try:
        lines = list(lines_from_chunks([path.read_bytes()]))
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); name a file of lines with --texts") from error
    if wrong := [line for line in lines if line.error is not None]:
        raise RequestError(f"{path}, line {wrong[0].number}: {wrong[0].error}")
    return [line.text for line in lines if line.text.strip()]
