"""The README and the requirements of a package, for the person who runs it on a GPU machine."""

from __future__ import annotations

from typing import Any

LIBRARIES = {
    "sentencepiece": "sentencepiece>=0.2",
    "huggingface": "tokenizers>=0.20",
}  # tokenizer kind -> what reads it
WHEELS = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx-cu13"}

README = """# {title}

An encoder-decoder Transformer as two ONNX graphs ({precision}, {cache_form} cache){engines}, with scripts that build
TensorRT engines from them, compare the engines with the model in fp64, decode text and time it. All that is needed is
Python 3.10 or later, an NVIDIA GPU with its driver, and the packages in requirements.txt.

    pip install -r requirements.txt
    python run_all.py                 # {first}, parity, decodes, timing: writes report.html
    python decode.py {example}

**Send back** `report.html` and `report.json`, also when the last line is FAIL. Exit code 0 means that all passed.

| file | what |
|---|---|
| run_all.py | everything below in order, and one report; `--rounds` timed runs a batch size |
| build.py | builds engines/; `--force` replaces engines, `--flavour tensorrt_rtx --gpu sm89` builds ahead of time |
| verify.py | parity alone: every tensor of recorded inputs against fp64, `--json FILE` |
| decode.py | text in, text out{decoding}; reads lines where no text is given |
| package.json | shapes of every input, budgets, expected outputs; sha256 of every file, checked before each command |

The engines take {batch} sources of {source} tokens and make {target} tokens at most. Made by seq2engine {version}.
"""


def readme_text(values: dict[str, Any], brought: str) -> str:
    """`values` are package.json's; `brought` is the TensorRT of the included engines, or `none`."""
    widest, decode = values["ranges"][0], values["decode"]
    most = widest["beam"]["max"]
    beam = f", `--beam` 1 to {most} (the model's own default is {decode['own_beam']})" if most > 1 else ", greedy"
    refused = f", but not this model, which asks for {decode['refused']}" if decode["refused"] else beam
    return README.format(
        title="TensorRT package",
        precision=values["precision"],
        cache_form=values["cache_form"],
        engines="" if brought == "none" else f" and engines of {brought}",
        first="builds the engines" if brought == "none" else "the included engines",
        example='"some text"'
        if values["tokenizer"]
        else '"17 4 250"   # token ids: this model came without a tokenizer',
        decoding=refused,
        batch=f"{widest['batch']['min']} to {widest['batch']['max']}",
        source=f"{widest['source']['min']} to {widest['source']['max']}",
        target=decode["max_length"],
        version=values["made_by"]["seq2engine"],
    )


def requirements_text(kind: str | None, built: tuple[str, str] | None) -> str:
    """`engines` are (flavour, version) of included engines: they open in no other version."""
    lines = ["numpy>=1.24"]
    if built is not None:
        lines.append(f"{WHEELS[built[0]]}=={built[1]}")
    else:
        lines += ["tensorrt>=10.15", "# or, to build without a GPU as well: tensorrt-rtx-cu13>=1.7"]
    if kind in LIBRARIES:
        lines.append(LIBRARIES[kind])
    return "\n".join(lines) + "\n"
