"""Every id and position is looked up, every branch taken, and a wrong row shows wherever it is looked up."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.mutations import Mutation, good_bundle, wrong_copy
from support.parity_cases import SMALL
from support.weight_mutations import WEIGHT_MUTATIONS, changed

from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.checkpoint import random_model
from seq2engine.model.presets import PRESETS
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.parity.coverage.branches import branch_results
from seq2engine.runtime.parity.coverage.lookups import lookup_results, source_parts, target_parts

RELATIVE = {"positions": "relative", "norm_kind": "rms", "norm": "pre", "biases": False, "scale_embeddings": False}


def three(bundle, precision="fp32"):
    return [open_session(bundle, *which, threads=1) for which in (("torch", "fp64"), ("torch", precision))] + [
        open_session(bundle, "onnxruntime", precision, threads=1)
    ]


@pytest.mark.parametrize("length", [1, 7, 512])
def test_parts_hold_every_id_and_every_position(length):
    parts = source_parts(1000, length, 1 << 16)
    assert set(np.concatenate([part["source_ids"].ravel() for part in parts])) == set(range(1000))
    assert {part["source_ids"].shape[1] for part in parts} == {length}
    for wide in (False, True):
        parts = target_parts(1000, length, 1 << 16, wide)
        assert set(np.concatenate([part["tokens"].ravel() for part in parts])) == set(range(1000))
        assert set(np.concatenate([part["position"].ravel() for part in parts])) == set(range(length))


@pytest.mark.each_value
@pytest.mark.parametrize(("positions", "tables"), [("sinusoidal", 2), ("learned", 2), ("rotary", 4)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_good_export_looks_up_what_pytorch_does(tmp_path, positions, tables, precision):
    config = dataclasses.replace(SMALL, positions=positions)
    found = lookup_results(*three(onnx_from_model(random_model(config, 3), tmp_path / "b", (precision,)), precision))
    assert len(found) == tables
    assert all(found), [result.reason for result in found]


@pytest.mark.parametrize("name", ["one embedding row negated", "positions shifted from 9 on"])
def test_a_row_that_no_sample_holds_is_looked_up(tmp_path, name):
    mutation = WEIGHT_MUTATIONS[name]
    wrong = wrong_copy(good_bundle(SMALL, mutation, tmp_path / "good"), tmp_path / "wrong", mutation)
    first, *others = lookup_results(*three(wrong))
    assert not first
    assert "source_embedding" in first.reason
    assert all(others)


def test_relative_positions_are_looked_up_at_every_distance(tmp_path):
    model = random_model(dataclasses.replace(SMALL, **RELATIVE), 3)
    found = lookup_results(*three(onnx_from_model(model, tmp_path / "b", ("fp32",))))
    assert [result.name.partition(",")[0] for result in found][-2:] == ["encoder_distances", "decoder_distances"]
    assert all(found), [result.reason for result in found]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_distances_of_every_layer_are_looked_up(tmp_path, side, layer):
    """Models whose layers have tables of their own, as UMT5."""
    config = dataclasses.replace(SMALL, **RELATIVE, distances_per_layer=True, max_distance=24)

    def one_number(values):
        values[15 + (24 if side == "encoder" else 0), layer * config.heads] += 1  # 15 positions before the query
        return values

    name = f"{side}_distances"
    graph = "encoder" if side == "encoder" else "decoder_step"
    mutation = Mutation(graph, changed(f"{name}.table", one_number), name, ())
    bundle = onnx_from_model(random_model(config, 3), tmp_path / "b", ("fp32",))
    assert all(lookup_results(*three(bundle)))
    found = lookup_results(*three(wrong_copy(bundle, tmp_path / "wrong", mutation)))
    wrong = [result.name.partition(",")[0] for result in found if not result]
    assert wrong == [f"{name} of layer {layer}"]


def test_the_screened_branch_puts_out_the_best_logits(tmp_path):
    config = dataclasses.replace(
        PRESETS["tiny"], source_vocab=32000, target_vocab=32000, tie_output=True, share_embeddings=True
    )
    bundle = onnx_from_model(random_model(config, 3), tmp_path / "b", ("fp32",))
    sessions = three(bundle)
    found = branch_results(*sessions, [[5, 6, 7]] * 16)
    assert [result.name for result in found] == ["best 1 logits, screened", "best 16 logits, screened"]
    assert all(found), [result.reason for result in found]
    assert branch_results(*sessions[:2], sessions[0], [[5]]) == ()
