"""The chain of passes by which a session that has the kernel library gets its graphs.

    encoder       attentions -> products -> embedding -> heads of the source
    decoder step  attentions -> vocabulary -> products -> embedding
    both          -> int8 forms of ort_forms for what no operator reads -> unread weights

They follow the forms of ort_forms that change inputs and outputs: transposed keys, beam positions, attention outputs,
cross rows and shortlist. Weights keep their names, numbers and files; they need not be loaded.
"""

from __future__ import annotations

import onnx
from onnx import helper

from seq2engine.errors import ExportError

from ..graph_index import copy_of, drop_unread_weights
from ..ort_forms.int8_matmul import CONTRIB, row_products
from . import ops
from .attention import fuse_attentions
from .embedding import fuse_embeddings
from .linear import fuse_products
from .source_heads import fuse_source_heads
from .vocabulary import fits, fuse_vocabulary

VERSIONS = {ops.DOMAIN: ops.VERSION, CONTRIB: 1}  # domains beside ONNX's own


def kernel_step(model: onnx.ModelProto, *, screened: bool) -> onnx.ModelProto:
    """A decoder step in fp32 or w8a8 -> the same in fused operators, with the input `wanted` and candidates as outputs.

    `screened`: as in vocabulary.py.
    """
    if not fits(model):
        raise ExportError(
            f"graph {model.graph.name} has no logits that are a product with a stored table: it is not a decoder step "
            "of ours; export the checkpoint again with: seq2engine export CHECKPOINT DIR"
        )
    made = copy_of(model)
    fuse_attentions(made.graph)
    fuse_vocabulary(made, screened=screened)
    fuse_products(made)
    fuse_embeddings(made.graph)
    return finished(made)


def kernel_layers(model: onnx.ModelProto) -> onnx.ModelProto:
    """A decoder step in fp32 -> the same with fused layers whose weights are rounded to int8 when a session opens, for
    a step that only drafts. The output projection stays as it is."""
    made = copy_of(model)
    fuse_attentions(made.graph)
    fuse_products(made, quantised=True, outputs=False)
    fuse_embeddings(made.graph)
    return finished(made)


def kernel_encoder(model: onnx.ModelProto) -> onnx.ModelProto:
    """An encoder in fp32 or w8a8 -> the same with fused attentions, products and heads of the source."""
    made = copy_of(model)
    fuse_attentions(made.graph)
    fuse_products(made)
    fuse_embeddings(made.graph)
    fuse_source_heads(made.graph)
    return finished(made)


def finished(model: onnx.ModelProto) -> onnx.ModelProto:
    """Takes the int8 forms of what is left, drops weights that nobody reads, and declares the domains of all nodes."""
    if any(node.op_type == "DequantizeLinear" for node in model.graph.node):
        model = row_products(model)
    drop_unread_weights(model.graph)
    del model.graph.value_info[:]  # of tensors that may be gone
    kept = [opset for opset in model.opset_import if opset.domain not in VERSIONS]
    used = {node.domain for node in model.graph.node}
    del model.opset_import[:]
    model.opset_import.extend(kept)
    model.opset_import.extend(helper.make_opsetid(name, number) for name, number in VERSIONS.items() if name in used)
    return model
