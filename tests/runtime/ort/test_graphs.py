"""Where onnx is not installed, every thread that must form a graph says so, not only the first."""

from __future__ import annotations

import subprocess
import sys

# Both threads are inside the import when onnx turns out to be missing.
TWO_THREADS = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from seq2engine.runtime.ort.graphs import OrtForm, graph_in_form

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "onnx":
            time.sleep(0.3)
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")

assert "onnx" not in sys.modules
sys.meta_path.insert(0, Missing())

def missing(name):
    try:
        graph_in_form(name, Path("nowhere"), OrtForm())
    except ImportError as error:
        return f"{type(error).__name__} {error.name}"

with ThreadPoolExecutor(2) as pool:
    print(*pool.map(missing, ("encoder", "decoder_step")), sep="\\n")
"""


def test_two_threads_miss_the_same_package():
    done = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["ModuleNotFoundError onnx"] * 2, done.stderr
