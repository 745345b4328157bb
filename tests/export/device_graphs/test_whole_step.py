"""A decoder step that makes its own mask: the step with the mask that the tree cache's update makes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from seq2engine.export.device_graphs.tree_mask import tree_mask
from seq2engine.export.device_graphs.whole_step import step_with_mask

SIZES = {"B": 2, "K": 3, "S": 5, "L": 16}


@pytest.mark.parametrize("begins", [False, True])
def test_the_mask_follows_from_the_latest_one_and_the_rest_is_the_step(bundles, feeds_for, run_onnx, begins):
    bundle = bundles("tiny", "static")
    spec = bundle.specs("fp32")["decoder_step"]
    step = onnx.load(bundle.graph_path("fp32", "decoder_step"))
    made = step_with_mask(step)
    onnx.checker.check_model(made, full_check=True)
    further = [value.name for value in made.graph.input][len(spec.inputs) :]
    assert further == ["parents", "beam", "slots"]
    assert made.graph.output[-1].name == "new_self_mask"
    assert len(made.graph.output) == len(spec.outputs) + 1

    rng = np.random.default_rng(4)
    feeds = feeds_for(spec, SIZES)
    feeds["write_index"] = np.array([4, 7])
    places = {"beam": np.arange(SIZES["K"]), "slots": np.arange(SIZES["L"])}
    parents = np.tile(np.arange(3), (2, 1)) if begins else np.array([[2, -1, 0], [1, 1, 0]])
    latest = rng.integers(0, 2, feeds["self_mask"].shape).astype(bool)
    update, update_spec = tree_mask("L")
    given = {**feeds, **places, "parents": parents, "self_mask": latest}
    (mask,) = run_onnx(update, {tensor.name: given[tensor.name] for tensor in update_spec.inputs}).values()
    found = run_onnx(made, given)
    assert np.array_equal(found.pop("new_self_mask"), mask)
    if begins:  # with a mask of its own, in which the new slots may be already
        assert np.array_equal(run_onnx(made, {**given, "self_mask": mask})["new_self_mask"], mask)
    expected = run_onnx(step, {**feeds, "self_mask": mask})
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
