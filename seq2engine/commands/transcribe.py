"""`seq2engine transcribe`: audio files in; text, subtitles or JSON out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq2engine.commands.run import print_precision
from seq2engine.common.terminal import fresh_line
from seq2engine.flags.precision import print_default_precision
from seq2engine.flags.shared import Commands, add_backend, add_bundle, add_command, backend_settings, progress_for

if TYPE_CHECKING:
    from seq2engine.runtime.speech.transcript import Transcript

FORMATS = ("txt", "srt", "vtt", "json")  # those of runtime/speech/formats.py, which a parser should not import
TIMED = ("srt", "vtt")
# Flags that are fields of TranscribeOptions; a flag that is not given leaves the field's default.
FIELDS = (
    *("language", "task", "timestamps", "words", "beam", "length_penalty", "best_of", "temperatures"),
    *("compression_ratio", "log_prob", "no_speech", "prompt", "previous_text", "max_length", "seed"),
)


def add_parser(commands: Commands) -> None:
    summary = "transcribe or translate speech: audio files to text, subtitles or JSON"
    sub = add_command(commands, "transcribe", run_transcribe, summary)
    add_bundle(sub)
    sub.add_argument("text", nargs="*", metavar="AUDIO", help="wav, flac, ogg, mp3 or aiff files, of any rate")
    add_backend(sub)
    add_transcribe_flags(sub)


def add_transcribe_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--language", help="code of the spoken language, such as en (default: detected)")
    sub.add_argument("--task", choices=("transcribe", "translate"), help="translate: the text is English")
    sub.add_argument("--timestamps", action="store_true", default=None, help="times of every segment")
    sub.add_argument(
        "--word-timestamps", dest="words", action="store_true", default=None, help="times of every word, in JSON"
    )
    sub.add_argument("--format", choices=FORMATS, help="txt, srt, vtt or json (default: txt)")
    sub.add_argument("--json", action="store_true", help="the same as --format json: one object for every file")
    sub.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for one NAME.FORMAT per file, instead of standard output"
    )
    sub.add_argument("--batch", type=int, default=8, help="maximum files decoded together (default: %(default)s)")
    sub.add_argument("--beam", type=int, help="beams; 1 is greedy (default: 1)")
    sub.add_argument("--length-penalty", type=float, help="length penalty of beam search (default: 1)")
    sub.add_argument("--max-length", type=int, help="maximum tokens of a 30 s window (default: half of the model's)")
    sub.add_argument("--prompt", help="text that the first window continues, such as names in their spelling")
    sub.add_argument(
        "--no-previous-text",
        dest="previous_text",
        action="store_false",
        default=None,
        help="do not condition a window on the text before it",
    )
    add_fallback_flags(sub)


def add_fallback_flags(sub: argparse.ArgumentParser) -> None:
    """Flags of the fallback: when an output is rejected, and what is tried next."""
    temperatures = "tried one after the other until an output passes; 0: no sampling (default: 0,0.2,0.4,0.6,0.8,1)"
    sub.add_argument("--temperatures", type=numbers, metavar="LIST", help=temperatures)
    sub.add_argument("--best-of", type=int, help="samples drawn at a temperature above 0 (default: 5)")
    ratio = "an output whose text compresses by more than this repeats itself and fails (default: 2.4)"
    sub.add_argument("--compression-ratio", type=float, help=ratio)
    log_prob = "an output whose mean log-probability is less than this fails (default: -1)"
    sub.add_argument("--log-prob", type=float, help=log_prob)
    no_speech = "a failed window with a larger probability of no speech is silence (default: 0.6)"
    sub.add_argument("--no-speech", type=float, help=no_speech)
    sub.add_argument("--seed", type=int, help="seed of the samples (default: 0)")


def numbers(text: str) -> tuple[float, ...]:
    """Of a list with commas."""
    return tuple(float(part) for part in text.split(","))


def run_transcribe(args: argparse.Namespace) -> int:
    """Prints or writes every transcript in the order of the files; a file that cannot be transcribed is reported
    and leaves an empty line in the output.
    """
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.export.artifact.profiles import Workload
    from seq2engine.runtime.speech.options import TranscribeOptions
    from seq2engine.runtime.translator import load

    form = "json" if args.json else args.format or "txt"
    check_arguments(args, form)
    given: dict[str, Any] = {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
    given["timestamps"] = bool(args.timestamps) or form in TIMED
    options = TranscribeOptions(**given)
    bundle = open_bundle(args.bundle)
    workload = Workload(beam=options.beam)
    with load(bundle, **backend_settings(args), attention=options.words, workload=workload) as model:
        print_precision(args, model)
        print_default_precision(args, bundle, model.session.precision, f"{args.backend} runs")
        failed = False
        for transcript in model.transcribe_iter(args.text, options, batch=args.batch, progress=progress_for(args)):
            if transcript.error is not None:
                failed = True
                print(f"{fresh_line(sys.stderr)}{named(transcript)}", file=sys.stderr)
            put_out(args, transcript, form)
    return 1 if failed else 0


def check_arguments(args: argparse.Namespace, form: str) -> None:
    if not args.text:
        args.usage_error("give at least one audio file")
    if args.json and args.format not in (None, "json"):
        args.usage_error(f"give either --json or --format {args.format}, not both")
    if form in TIMED and len(args.text) > 1 and args.out is None:
        args.usage_error("subtitles of several files cannot share one output; give a folder: --out DIR")
    if args.out is not None:
        names = [Path(audio).stem for audio in args.text]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            args.usage_error(f"two files named {twice[0]} would be written to one place in --out; rename one of them")


def named(transcript: Transcript) -> str:
    """The error, with the file's name once."""
    assert transcript.error is not None
    return transcript.error if transcript.name in transcript.error else f"{transcript.name}: {transcript.error}"


def put_out(args: argparse.Namespace, transcript: Transcript, form: str) -> None:
    from seq2engine.common.atomic_folders import new_file
    from seq2engine.runtime.speech.formats import FORMATS

    if args.out is None:
        text = FORMATS[form](transcript, bool(args.timestamps))
        sys.stderr.write(fresh_line(sys.stderr) if sys.stdout.isatty() else "")
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    elif transcript.error is None:  # an older transcript of a failed file stays
        args.out.mkdir(parents=True, exist_ok=True)
        with new_file(args.out / f"{Path(transcript.name).stem}.{form}") as beside:
            beside.write_text(FORMATS[form](transcript, bool(args.timestamps)), encoding="utf-8")
