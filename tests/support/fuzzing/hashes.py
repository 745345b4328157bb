"""Hashes of a mutated bundle made right again: without that, most mutations would end at the first check."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

TRAINING = "--d-model 16 --d-ff 16 --heads 2 --encoder-layers 1 --decoder-layers 1 --epochs 2 --source-length 8"


def mend_hashes(bundle: Path) -> None:
    """Makes manifest and passports describe the files that are there, as an attacker would."""
    manifest = bundle / "manifest.json"
    try:
        values = json.loads(content_of(manifest))
        values["checkpoint_sha256"] = digest(bundle / "model.safetensors")
        for path in values["companions"]:
            values["companions"][path] = digest(bundle / path)
        for graphs in values["graphs"].values():
            for entry in graphs.values():
                entry["sha256"], entry["data_sha256"] = (
                    digest(bundle / entry["path"]),
                    digest(bundle / entry["data_path"]),
                )
        manifest.write_text(json.dumps(values))
        for path in (bundle / "engines").glob("*/passport.json"):
            passport = json.loads(content_of(path))
            for name, entry in passport["engines"].items():
                engine = path.parent / entry["file"]
                entry["bytes"], entry["sha256"] = engine.stat().st_size, digest(engine)
                if name in ("encoder", "decoder_step"):
                    graph = values["graphs"]["fp32"][name]
                    both = f"{graph['sha256']} {graph['data_sha256']}".encode()
                    entry["onnx_fingerprint"] = hashlib.sha256(both).hexdigest()
            path.write_text(json.dumps(passport))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # what is mutated is the manifest itself


def digest(path: Path) -> str:
    return hashlib.sha256(content_of(path)).hexdigest()


def content_of(path: Path) -> bytes:
    """Of regular files only: another mutation may have put a pipe or a device there."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.read_bytes()
