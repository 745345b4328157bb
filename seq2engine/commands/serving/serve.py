"""`seq2engine serve`: an HTTP server of one model in one process."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from seq2engine.errors import RequestError
from seq2engine.flags.shared import Commands, add_backend, add_bundle, add_command, add_draft, backend_settings

TOKEN_VARIABLE = "SEQ2ENGINE_TOKEN"
LONGEST_TOKEN = 1 << 16  # bytes of its file


def add_parser(commands: Commands) -> None:
    summary = "serve a model over HTTP: JSON, streaming, metrics and a page to try it"
    sub = add_command(commands, "serve", run_serve, summary)
    add_bundle(sub)
    add_backend(sub)
    add_draft(sub)
    sub.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    sub.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    sub.add_argument("--name", help="name of the model on its pages (default: the bundle's folder)")
    sub.add_argument("--ids", action="store_true", help="texts are lines of token ids, although the bundle takes text")
    sub.add_argument("--batch", type=int, default=32, help="maximum texts decoded together (default: %(default)s)")
    sub.add_argument(
        "--queue", type=int, default=256, help="maximum waiting texts; more get status 429 (default: %(default)s)"
    )
    sub.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="timeout of a request in seconds, then status 504 (default: %(default)g)",
    )
    sub.add_argument(
        "--max-body",
        type=int,
        default=1 << 20,
        help="maximum bytes of a request; more get status 413 (default: %(default)s)",
    )
    sub.add_argument(
        "--max-beams", type=int, default=32, help="maximum beams or samples per text (default: %(default)s)"
    )
    sub.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"clients must send the bearer token in this file (or in the variable {TOKEN_VARIABLE})",
    )


def run_serve(args: argparse.Namespace) -> int:
    from seq2engine.export.artifact.bundle import open_bundle
    from seq2engine.runtime.encoder_inputs import check_takes_text
    from seq2engine.runtime.serving.service import TextService
    from seq2engine.runtime.translator import load
    from seq2engine.serving.app import Application, ServerLimits
    from seq2engine.serving.server import address_of, listening_socket, run_server

    limits = ServerLimits(args.max_body, args.timeout, token_from(args.token_file))
    bundle = open_bundle(args.bundle)
    check_takes_text(bundle.config, bundle.root)
    name = args.name or bundle.root.resolve().name
    with (
        listening_socket(args.host, args.port) as listening,
        load(bundle, **backend_settings(args), draft=args.draft, ids=args.ids) as model,
        TextService(model, args.batch, args.queue, args.max_beams) as service,
    ):
        service.warm_up()
        application = Application(service, name, limits)
        what = f"{model.session.backend} {model.session.precision}, {service.scheduler.rows} texts at once"

        def started() -> None:
            print(f"serving {name} ({what}) at {address_of(listening)}", flush=True)

        run_server(application.starlette(), listening, args.timeout, started)
        application.maps.close()
    if not args.quiet:
        print("stopped; all accepted requests were answered", file=sys.stderr)
    return 0


def token_from(path: Path | None) -> str | None:
    """The bearer token of a file or of the environment; it is never printed."""
    from seq2engine.common.json_files import read_text

    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = read_text(path, LONGEST_TOKEN).strip()
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read the token file {path}: {getattr(error, 'strerror', None) or error}") from error
    if not token or len(token.split()) > 1 or not token.isascii():
        raise RequestError(f"the token file {path} holds no token, expected one word of ASCII characters")
    return token
