"""The kernel program in an engine: an undocumented format, so it is checked with the installed version."""

from __future__ import annotations

import re

import pytest

from seq2engine.export.engines.kernels import KernelProgram, kernels_by_profile, kernels_from_engine

TEXT = b"""binary \x00\xff before
main {
   shape_call={ name=__mye1_0 }
   function={ name=__myl_CastGath grid=[1] }
   runtime_fusion={ name=__myl_FcAdd }
   function={ name=_gemv_mha_v1 }
   fully_connected={ name="decoder.0.self_attn.out/MatMul_U28+other" }
   copy={ name=__copy_1 }
   wait={ name=stream_2 }
}
between \x01
main {
   function={ name=_gemm_mha_v2 }
}
behind"""


def test_statements_are_read_in_order_from_every_block():
    assert kernels_from_engine(TEXT).statements == (
        ("shape_call", "__mye1_0"),
        ("function", "__myl_CastGath"),
        ("runtime_fusion", "__myl_FcAdd"),
        ("function", "_gemv_mha_v1"),
        ("fully_connected", "decoder.0.self_attn.out/MatMul_U28+other"),
        ("copy", "__copy_1"),
        ("wait", "stream_2"),
        ("function", "_gemm_mha_v2"),
    )


def test_what_runs_on_the_gpu_is_a_launch_and_both_attention_kernels_are_known():
    program = kernels_from_engine(TEXT)
    assert program.launches == 5  # functions, products and copies; not shapes, waits and the head of a fusion
    assert program.fused_attentions == 2


def test_every_profile_has_a_program_with_the_fusions_behind_it():
    one, two = kernels_by_profile(TEXT + TEXT, 2)
    assert one == two == kernels_from_engine(TEXT)
    assert kernels_by_profile(TEXT, 1) == [one]
    assert kernels_by_profile(b"", 2) == [KernelProgram(())]


@pytest.mark.parametrize("engine", [b"", b"no program", b"\x00" * 1000, b"\nmain {\n"])
def test_an_engine_without_a_program_has_no_launches(engine):
    program = kernels_from_engine(engine)
    assert (program.launches, program.fused_attentions) == (0, 0)


def test_an_empty_program_launches_nothing():
    assert (KernelProgram(()).launches, KernelProgram(()).fused_attentions) == (0, 0)


@pytest.mark.parametrize(("graph", "stack"), [("encoder", "encoder"), ("decoder_step", "decoder")])
def test_a_real_engine_names_our_modules(graph, stack, built):
    program = kernels_from_engine(built().bytes_of(graph))
    kinds = {kind for kind, _ in program.statements}
    assert {"function", "fully_connected", "runtime_fusion"} <= kinds
    # Every product of the layers is there, under the name of its node: what is launched is our model.
    products = " ".join(name for kind, name in program.statements if kind == "fully_connected")
    for layer in range(2):
        for part in ("self_attn.qkv", "self_attn.out", "feed_forward.up", "feed_forward.down"):
            assert re.search(rf"\b{stack}\.{layer}\.{re.escape(part)}/MatMul", products)
    # A product, at least, is launched for each of these; and far fewer kernels than there are nodes.
    assert 2 * 4 < program.launches < 60
    assert program.launches <= len(program.statements)


def test_two_builds_of_other_precision_have_their_own_programs(built):
    half, full = (kernels_from_engine(built(precision=p).bytes_of("decoder_step")) for p in ("fp16", "fp32"))
    # Only in fp16 are the logits cast back at the end.
    assert half.launches == full.launches + 1
