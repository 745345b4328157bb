"""Builds the engines of this package on this machine. Needs numpy and `tensorrt` (or `tensorrt_rtx`).

    python build.py                                        for the GPU of this machine
    python build.py --flavour tensorrt_rtx --gpu sm89   ahead of time, also without a GPU

The shapes of every input at min, opt and max are written out in package.json, profile by profile. Every file is checked
against its hash first. Engines that are there already are replaced only with --force.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from package_files import FLAVOURS, PackageError, load_tensorrt, read_package

# First: it reports in one line what is not installed.
# isort: split

from engine_building import build_engines
from trt_engine import EngineFailed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Builds the engines of this package.")
    parser.add_argument("--flavour", choices=FLAVOURS, help="(default: the one installed)")
    parser.add_argument("--gpu", nargs="+", default=[], metavar="SM", help="tensorrt_rtx only, such as sm89")
    parser.add_argument("--force", action="store_true", help="replace existing engines")
    args = parser.parse_args(argv)
    try:
        build_engines(read_package(), load_tensorrt(args.flavour), args.gpu, args.force)
    except (PackageError, EngineFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("next: python run_all.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
