"""Graphs that torch.onnx makes of a transformers model, against our reference of the same checkpoint."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.foreign_exports import foreign_graphs
from support.hugging_face_models import small_model

from seq2engine.errors import ConfigError, GraphError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.importers.hugging_face import checkpoint_from_hugging_face
from seq2engine.runtime.parity.foreign.compare import foreign_parity
from seq2engine.runtime.parity.foreign.roles import caches_of, foreign_graph


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Our bundle of a small Marian, and torch.onnx's graphs of it."""
    folder = tmp_path_factory.mktemp("foreign")
    model = small_model("marian").eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    bundle = onnx_from_model(checkpoint_from_hugging_face(folder).model, folder / "bundle", ("fp32",))
    return bundle, foreign_graphs(model, folder)


def test_roles_are_recognised_by_inputs(made):
    bundle, paths = made
    for role, path in paths.items():
        graph = foreign_graph(path, bundle.config, 1)
        assert graph.role == role
        assert graph.precision == "fp32"
    kinds = foreign_graph(paths["with past"], bundle.config, 1).inputs
    assert kinds["past_key_values.1.encoder.value"] == "cross_v.1"
    assert kinds["past_key_values.0.decoder.key"] == "self_k.0"
    assert kinds["encoder_attention_mask"] == "source_mask"


def test_caches_without_names_are_in_the_order_of_transformers():
    assert list(caches_of([f"x{n}_" for n in "abcdefgh"], 2).values()) == [
        *("self_k.0", "self_v.0", "cross_k.0", "cross_v.0"),
        *("self_k.1", "self_v.1", "cross_k.1", "cross_v.1"),
    ]


def test_good_graphs_pass_and_their_weights_are_matched(made):
    bundle, paths = made
    for result in foreign_parity(bundle, list(paths.values()), threads=1):
        assert result, result.reason
        assert result.finding is None
        assert result.weights[0].traced > 25
        assert {"copy, split", "transpose, split"} <= set(result.weights[0].passes)


def swapped_copy(path, folder):
    """One layer reads its cached keys as values, and values as keys."""
    model = onnx.load(path)
    names = [f"past_key_values.1.decoder.{part}" for part in ("key", "value")]
    swapped = dict(zip(names, names[::-1], strict=True))
    for node in model.graph.node:
        node.input[:] = [swapped.get(name, name) for name in node.input]
    onnx.save(model, folder / path.name)
    return folder / path.name


def test_a_step_that_mistakes_keys_for_values_fails_at_every_step(made, tmp_path):
    bundle, paths = made
    (result,) = foreign_parity(bundle, [swapped_copy(paths["with past"], tmp_path)], max_length=6, threads=1)
    assert not result
    wrong = {tensor.step for tensor in result.tensors if not tensor and tensor.step is not None}
    assert wrong >= {1, 2, 3}
    assert result.finding.cause == "unknown"
    assert "every stored tensor that is like one of the reference's is equal to it; logits are wrong at steps 1," in (
        result.finding.text
    )


def changed_copy(path, folder, change):
    """A graph with one weight of a product changed: the change gets its numbers."""
    model = onnx.load(path)
    weights = {weight.name: weight for weight in model.graph.initializer}
    product = next(n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights)
    weight = weights[product.input[1]]
    weight.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(weight).copy()), weight.name))
    onnx.save(model, folder / path.name)
    return folder / path.name


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda w: np.ascontiguousarray(np.where(np.arange(w.shape[1]) == 3, -w, w)), "sign"),
        (lambda w: w * np.float32(1.01), "wrong scale"),
        (lambda w: w.astype(np.float16).astype(np.float32), "precision"),
    ],
)
def test_a_wrong_weight_of_theirs_is_located(made, tmp_path, change, cause):
    bundle, paths = made
    (result,) = foreign_parity(bundle, [changed_copy(paths["decoder"], tmp_path, change)], threads=1)
    assert not result
    assert result.finding.cause == cause, result.finding.text
    assert result.finding.layer == "decoder.0"


def test_a_graph_that_is_none_of_the_model_is_refused(made, tmp_path):
    bundle, _ = made
    with pytest.raises(ConfigError, match="is not an encoder or decoder with known inputs"):
        foreign_graph(bundle.graph_path("fp32", "decoder_step"), bundle.config, 1)
    with pytest.raises(ConfigError, match="is not a file"):
        foreign_graph(tmp_path / "nothing.onnx", bundle.config, 1)


def test_an_input_of_a_type_that_nothing_can_be_fed_as_is_refused(made, tmp_path):
    """A mask that nothing reads may be of any type, strings too."""
    bundle, paths = made
    model = onnx.load(paths["encoder"])
    mask = next(value for value in model.graph.input if "mask" in value.name)
    unread = onnx.ValueInfoProto()
    unread.CopyFrom(mask)
    unread.name, unread.type.tensor_type.elem_type = "attention_mask_2", onnx.TensorProto.STRING
    model.graph.input.append(unread)
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(ConfigError, match=r"takes attention_mask_2 tensor\(string\), expected inputs of tensor"):
        foreign_graph(tmp_path / "odd.onnx", bundle.config, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"/layers.0/self_attn/k_proj/MatMul", "cannot be used as a graph"),
        (b"LayerNormalization", "(cannot be used as a graph|cannot load)"),
        (b"last_hidden_state", "(cannot be used as a graph|cannot load)"),
    ],
)
def test_names_that_are_no_text_are_one_line(made, tmp_path, name, reason):
    """Bytes of a name overwritten: ONNX Runtime quotes it in an error that Python cannot read."""
    bundle, paths = made
    content = paths["encoder"].read_bytes()
    assert name in content
    (tmp_path / "broken.onnx").write_bytes(content.replace(name, b"\xea" + name[1:]))
    with pytest.raises(GraphError, match=reason) as caught:
        foreign_graph(tmp_path / "broken.onnx", bundle.config, 1)
    assert "\n" not in str(caught.value)


def test_the_command_writes_a_report_for_each_graph(made, tmp_path, cli):
    bundle, paths = made
    root = tmp_path / "bundle"
    shutil.copytree(bundle.root, root)
    wrong = swapped_copy(paths["with past"], tmp_path)
    flags = ("--graph", paths["encoder"], "--graph", wrong, "--max-length", 5, "--threads", 1, "--quiet")
    code, out, _ = cli("parity", root, *flags, "--json")
    first, second = json.loads(out)
    assert code == 1
    assert first["verdict"]
    assert not second["verdict"]
    assert len(list((root / "reports").glob("parity-graph*.html"))) == 2
    code, _, err = cli("parity", root, *flags, "--against", "torch")
    assert code == 2
    assert "leave out --gate and --against" in err
