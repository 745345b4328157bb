"""What a report is about: enough to tell it from another one, and nothing heavy is imported to find it out."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime

from seq2engine.common.about import PACKAGES, about_rows, first_version, installed_versions, machine_text
from seq2engine.common.page import about_html
from seq2engine.model.presets import PRESETS

NOON = datetime(2026, 5, 4, 12, 30, 1)


def test_rows_name_model_weights_date_versions_machine_and_command():
    rows = dict(about_rows("g2p", PRESETS["tiny"].shape, "abcdef0123456789", "seq2engine parity out/g2p", NOON))
    assert rows["model"] == "g2p, 2+2 layers, d_model 64, 4 heads, vocabulary 256/256"
    assert rows["checkpoint"] == "abcdef012345"
    assert rows["date"] == "2026-05-04 12:30"
    assert rows["command"] == "seq2engine parity out/g2p"
    assert rows["versions"].startswith("seq2engine ")
    assert "onnxruntime " in rows["versions"]
    assert " core" in rows["machine"]


def test_what_is_not_known_has_no_row():
    assert [name for name, _ in about_rows("g2p", now=NOON)] == ["model", "date", "versions", "machine"]


def test_versions_are_those_of_the_packages_that_are_installed():
    import onnxruntime
    import torch

    versions = installed_versions()
    assert list(versions) == [name for name in PACKAGES if name in versions]
    assert versions["onnxruntime"] == onnxruntime.__version__
    assert versions["torch"] == torch.__version__
    assert first_version(("no-such-package-at-all", "torch")) == torch.__version__
    assert first_version(("no-such-package-at-all",)) == ""


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from seq2engine.common.about import about_rows; about_rows('x')\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'tensorrt', 'tensorrt_rtx', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_processor_is_the_one_the_system_names(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU 9000\n")
    assert machine_text(tmp_path / "cpuinfo").startswith("Fast CPU 9000, ")
    assert machine_text(tmp_path / "none").count(", ") >= 3


def test_the_block_holds_every_row_as_text():
    html = about_html([("model", "a<b"), ("date", "today")])
    assert html == '<dl class="about"><dt>model</dt><dd>a&lt;b</dd><dt>date</dt><dd>today</dd></dl>'
