"""The whole model: masks that hide what they should, and torch's own as a witness."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounding import FP32, apart, tensor_error
from support.small_transformers import (
    PAD,
    VOCAB,
    assert_same_numbers,
    each_norm,
    each_positions,
    mask_of,
    new_model,
    random_ids,
    seeds,
    small_config,
    small_model,
    some_sources,
    some_targets,
    stepped,
    teacher_forced,
)
from torch import nn

from seq2engine.model.layers import sinusoids, write_slots
from seq2engine.model.presets import PRESETS
from seq2engine.model.transformer import Embedding, Residual, Transformer

# Embeddings


def embedding(**values: object) -> Embedding:
    part = Embedding(small_config(**values), VOCAB, 8).requires_grad_(False)
    if values["positions"] == "learned":
        nn.init.normal_(part.positions)
    return part


@pytest.mark.parametrize(("scaled", "factor"), [(True, 4.0), (False, 1.0)])
@each_positions
def test_embeddings_are_scaled_and_given_their_positions(positions: str, scaled: bool, factor: float) -> None:
    part = embedding(positions=positions, scale_embeddings=scaled)  # d_model is 16, its root 4
    found = part(torch.tensor([[3, 5], [5, 3]]), torch.tensor([[0, 1]]))
    added = {"sinusoidal": sinusoids(8, 16), "learned": part.positions}.get(positions, torch.zeros(8, 16))
    for row, column, token in [(0, 0, 3), (0, 1, 5), (1, 0, 5), (1, 1, 3)]:
        expected = part.tokens.weight[token] * factor + added[column]
        near = apart([(2, FP32)]) * expected.abs().max().item()  # a product and a sum
        torch.testing.assert_close(found[row, column], expected, rtol=0, atol=near)


def test_embedding_by_hand() -> None:
    part = embedding(positions="sinusoidal")
    nn.init.constant_(part.tokens.weight, 0.5)
    found = part(torch.tensor([[7]]), torch.tensor([[3]]))[0, 0]
    assert found[0].item() == pytest.approx(0.5 * 4 + math.sin(3), rel=apart([(2, FP32)]))
    assert found[1].item() == pytest.approx(0.5 * 4 + math.cos(3), rel=apart([(4, FP32)]))


def test_beams_share_the_position_of_their_source() -> None:
    part = embedding(positions="learned")
    found = part(torch.tensor([[3, 4, 5], [3, 4, 5]]), torch.tensor([[2], [6]]))
    near = apart([(4, FP32)]) * 2 * found.abs().max().item()  # a sum each, and their differences
    expected = (part.positions[6] - part.positions[2]).expand(3, -1)
    torch.testing.assert_close(found[1] - found[0], expected, rtol=0, atol=near)


# What a model is made of


def test_base_has_as_many_weights_as_in_the_paper() -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS["base"])
    square, wide, norm = 512 * 512 + 512, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    encoder, decoder = 4 * square + wide + 2 * norm, 8 * square + wide + 3 * norm
    assert sum(weight.numel() for weight in model.parameters()) == 6 * (encoder + decoder) + 32000 * 512


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_tables_are_one_where_the_config_ties_them(share: bool, tie: bool) -> None:
    model = small_model(share_embeddings=share, tie_output=tie)
    table = model.target_embedding.tokens.weight
    assert (model.source_embedding.tokens.weight is table) == share
    assert (model.output.weight is table) == tie


def test_the_output_bias_is_added_to_the_logits() -> None:
    model = new_model(output_bias=True)
    target = some_targets(3)
    with_bias = teacher_forced(model, target)
    bias = model.output.bias.clone()
    model.output.bias.zero_()
    assert bias.abs().min() > 0
    torch.testing.assert_close(with_bias - teacher_forced(model, target), bias.expand(3, 3, -1))


@each_norm
def test_dropout_is_for_training_only(norm: str) -> None:
    model = new_model(norm=norm, dropout=0.5)
    target = some_targets(3)
    assert torch.equal(teacher_forced(model, target), teacher_forced(small_model(norm=norm), target))
    model.train()
    assert not torch.isclose(teacher_forced(model, target), teacher_forced(model, target)).all(dim=-1).any()


def test_dropout_drops_from_embeddings() -> None:
    part = embedding(positions="rotary", dropout=0.5)
    nn.init.constant_(part.tokens.weight, 0.5)
    found = part(torch.zeros(50, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
    assert found.unique().tolist() == [0, 4]  # 0.5 * sqrt(16), doubled where it stays


def test_dropout_drops_from_the_branch_and_never_from_the_skip_connection() -> None:
    residual = Residual(small_config(norm="pre", dropout=0.5))
    left = residual.leave(torch.full((50, 16), 10.0), torch.ones(50, 16))
    assert left.unique().tolist() == [10, 12]  # what stays is doubled, so that the mean stays


# Positions


@each_positions
def test_the_order_of_the_source_counts(positions: str) -> None:
    model = small_model(positions=positions)
    source, mask = random_ids(2, 5, seed=3), torch.ones(2, 5, dtype=torch.bool)
    states, _ = model.encode(source, mask)
    reversed_states, _ = model.encode(source.flip(1), mask)
    assert not torch.isclose(reversed_states.flip(1), states).all(dim=-1).any()


@each_positions
def test_the_order_of_the_target_counts(positions: str) -> None:
    model = small_model(positions=positions, decoder_layers=1)  # a second layer tells order by the causal mask alone
    target = some_targets(4)
    target[:, 1:3] = torch.tensor([5, 6])
    swapped = target[:, [0, 2, 1, 3]]
    last, last_swapped = teacher_forced(model, target)[:, -1], teacher_forced(model, swapped)[:, -1]
    assert ((last - last_swapped).abs().amax(dim=-1) > tensor_error(model.config, last, "fp64")).all()


@each_norm
def test_a_rotary_decoder_knows_distances_only(norm: str) -> None:
    model = small_model(norm=norm, positions="rotary", max_target=16)
    target = some_targets(5)
    found = stepped(model, target, write_slots, first_position=7)
    assert_same_numbers(model, found, teacher_forced(model, target), "fp32")  # as the table is


# Masks


@each_norm
@each_positions
def test_a_future_token_never_changes_a_past_logit(norm: str, positions: str) -> None:
    model = small_model(norm=norm, positions=positions)
    source, mask = some_sources(model)
    target = some_targets(6)
    before = model(source, mask, target)
    for place in range(1, 6):
        changed = target.clone()
        changed[:, place:] = (changed[:, place:] + 1) % VOCAB
        after = model(source, mask, changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.isclose(after[:, place], before[:, place]).all(dim=-1).any()


@each_norm
@each_positions
def test_every_past_token_counts(norm: str, positions: str) -> None:
    model = small_model(norm=norm, positions=positions)
    source, mask = some_sources(model)
    target = some_targets(6)
    before = model(source, mask, target)[:, -1]
    for place in range(6):
        changed = target.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCAB
        after, near = model(source, mask, changed)[:, -1], tensor_error(model.config, before, "fp64")
        assert not torch.isclose(after, before, rtol=0, atol=near).all(dim=-1).any()


@pytest.mark.each_value
@each_norm
@each_positions
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), more=st.integers(0, 4), seed=seeds)
def test_padding_never_changes_anything(norm: str, positions: str, lengths: list[int], more: int, seed: int) -> None:
    model = small_model(norm=norm, positions=positions)
    width = max(lengths) + more
    source, mask, target = random_ids(len(lengths), width, seed=seed), mask_of(lengths, width), some_targets(4, 1)
    target = target.expand(len(lengths), -1)
    logits = model(source, mask, target)
    states, _ = model.encode(source, mask)
    for row, length in enumerate(lengths):  # among longer neighbours, as alone
        alone, whole = source[row : row + 1, :length], mask[row : row + 1, :length]
        assert_same_numbers(model, logits[row : row + 1], model(alone, whole, target[:1]))
        assert_same_numbers(model, states[row : row + 1, :length], model.encode(alone, whole)[0])
    padded = source.masked_fill(~mask, PAD)  # whatever ids stand in the padding
    assert torch.equal(model(padded, mask, target), logits)


def test_every_source_token_counts() -> None:
    model = small_model()
    source, mask = some_sources(model)
    target = some_targets(3)
    before = model(source, mask, target)
    for row, length in enumerate([5, 2, 4]):
        for place in range(length):
            changed = source.clone()
            changed[row, place] = (changed[row, place] + 1) % VOCAB
            after, near = model(changed, mask, target), tensor_error(model.config, before, "fp64")
            differs = ~torch.isclose(after, before, rtol=0, atol=near).all(dim=-1).all(dim=-1)
            assert differs.tolist() == [other == row for other in range(3)]


@each_norm
@each_positions
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_row_of_padding_only_is_finite_and_harmless(norm: str, positions: str, dtype: torch.dtype) -> None:
    model = new_model(norm=norm, positions=positions).to(dtype)
    source, mask = some_sources(model)
    target = some_targets(4)
    before = model(source, mask, target)
    mask[1] = False
    states, _ = model.encode(source, mask)
    after = model(source, mask, target)
    assert states.isfinite().all()
    assert after.isfinite().all()
    precision = {torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    near = tensor_error(model.config, before, precision)
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=near)


# torch's own Transformer


def copy_attention(theirs: nn.MultiheadAttention, into_qkv: list[nn.Linear], out: nn.Linear) -> None:
    theirs.in_proj_weight.copy_(torch.cat([linear.weight for linear in into_qkv]))
    theirs.in_proj_bias.copy_(torch.cat([linear.bias for linear in into_qkv]))
    theirs.out_proj.load_state_dict(out.state_dict())


def torch_twin(model: Transformer) -> nn.Transformer:
    """torch.nn.Transformer with the weights of ours."""
    config = model.config
    sizes = (config.d_model, config.heads, config.d_ff)
    options = {"dropout": 0.0, "activation": config.activation, "norm_first": config.norm == "pre"}
    options |= {"batch_first": True, "layer_norm_eps": config.norm_epsilon}
    final = [nn.LayerNorm(config.d_model, config.norm_epsilon) if config.norm == "pre" else None for _ in range(2)]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(*sizes, **options), config.encoder_layers, final[0], enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **options), config.decoder_layers, final[1])
    twin = nn.Transformer(*sizes[:2], custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    twin = twin.double().eval().requires_grad_(False)
    for ours, theirs in [
        *zip(model.encoder, encoder.layers, strict=True),
        *zip(model.decoder, decoder.layers, strict=True),
    ]:
        copy_attention(theirs.self_attn, [ours.self_attn.qkv], ours.self_attn.out)
        norms = [ours.self_residual.norm, ours.feed_residual.norm]
        if hasattr(ours, "cross_attn"):
            copy_attention(theirs.multihead_attn, [ours.cross_attn.q, ours.cross_attn.kv], ours.cross_attn.out)
            norms.insert(1, ours.cross_residual.norm)
        for number, norm in enumerate(norms, start=1):
            getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
        theirs.linear1.load_state_dict(ours.feed_forward.up.state_dict())
        theirs.linear2.load_state_dict(ours.feed_forward.down.state_dict())
    if config.norm == "pre":
        encoder.norm.load_state_dict(model.encoder_norm.state_dict())
        decoder.norm.load_state_dict(model.decoder_norm.state_dict())
    return twin


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@each_norm
def test_the_model_is_that_of_torch(norm: str, activation: str) -> None:
    model = small_model(norm=norm, activation=activation, encoder_layers=2, decoder_layers=3)
    source, mask = some_sources(model)
    target = some_targets(6)
    twin = torch_twin(model)
    states = twin.encoder(model.source_embedding(source, torch.arange(5)[None]), mask=None, src_key_padding_mask=~mask)
    found, _ = model.encode(source, mask)
    assert_same_numbers(model, found[mask], states[mask])
    decoded = twin.decoder(
        model.target_embedding(target, torch.arange(6)[None]),
        states.masked_fill(~mask[..., None], 0.0),  # what torch leaves in the padding is nobody's business
        tgt_mask=torch.ones(6, 6, dtype=torch.bool).triu(1),
        memory_key_padding_mask=~mask,
    )
    expected = decoded @ model.output.weight.T
    assert_same_numbers(model, model(source, mask, target), expected)
