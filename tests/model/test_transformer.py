"""The whole model: masks that hide what they should, steps that equal teacher forcing, and torch's own as a witness."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from seq2engine.model.checkpoint import random_model
from seq2engine.model.config import PRESETS, ModelConfig
from seq2engine.model.layers import KeyValue, Store, append_slots, sinusoids, write_slots
from seq2engine.model.transformer import Embedding, Residual, Transformer

VOCAB, PAD, START = 13, 0, 1
NORMS, POSITIONS = ("post", "pre"), ("sinusoidal", "learned", "rotary")
each_norm = pytest.mark.parametrize("norm", NORMS)
each_positions = pytest.mark.parametrize("positions", POSITIONS)
each_store = pytest.mark.parametrize("store", [write_slots, append_slots], ids=["static", "growing"])
seeds = st.integers(0, 2**31)
# The variants that are not a matter of norm and positions, each at least once.
VARIANTS = [
    {"tie_output": False},
    {"output_bias": True},
    {"tie_output": False, "output_bias": True, "activation": "silu"},
    {"activation": "gelu"},
    {"scale_embeddings": False},
    {"share_embeddings": False, "source_vocab": 7},
    {"encoder_layers": 1, "decoder_layers": 3, "norm": "pre", "positions": "rotary"},
    {"heads": 1, "norm_epsilon": 1e-3},
]


def small_config(**values: object) -> ModelConfig:
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "heads": 2, "d_model": 16, "d_ff": 24, "max_source": 12}
    return ModelConfig(**sizes | {"source_vocab": VOCAB, "target_vocab": VOCAB, "max_target": 8} | values)


def new_model(**values: object) -> Transformer:
    """In double, so that a difference is a mistake and not rounding.

    Queries and keys are short, so that attention is spread out: where it picks one slot, a wrong mask may not show.
    """
    model = random_model(small_config(**values), seed=1).double().requires_grad_(False)
    for layer in (*model.encoder, *model.decoder):
        layer.self_attn.qkv.weight *= 0.3
    for layer in model.decoder:
        layer.cross_attn.q.weight *= 0.3
    return model


small_model = cache(new_model)  # for tests that leave it as it is


def random_ids(*shape: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(3, vocab, shape, generator=torch.Generator().manual_seed(seed))


def mask_of(lengths: list[int], width: int) -> Tensor:
    """[B, width], True where a source has a token."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def some_sources(model: Transformer) -> tuple[Tensor, Tensor]:
    """Three sources of lengths 5, 2 and 4."""
    mask = mask_of([5, 2, 4], 5)
    return random_ids(3, 5, seed=0, vocab=model.config.source_vocab).masked_fill(~mask, PAD), mask


def some_targets(length: int, batch: int = 3) -> Tensor:
    return torch.cat((torch.full((batch, 1), START), random_ids(batch, length - 1, seed=9)), dim=1)


def empty_cache(model: Transformer, batch: int, slots: int, store: Store) -> list[KeyValue]:
    """A growing cache of no slots, or a static one full of what another decode may have left there."""
    config = model.config
    shape = (batch, config.heads, 0 if store is append_slots else slots, config.head_dim)
    return [(torch.full(shape, 1e3).double(), torch.full(shape, -1e3).double()) for _ in model.decoder]


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
    added = {"sinusoidal": sinusoids(8, 16), "learned": part.positions, "rotary": torch.zeros(8, 16)}[positions]
    for row, column, token in [(0, 0, 3), (0, 1, 5), (1, 0, 5), (1, 1, 3)]:
        expected = part.tokens.weight[token] * factor + added[column]
        torch.testing.assert_close(found[row, column], expected)


def test_embedding_by_hand() -> None:
    part = embedding(positions="sinusoidal")
    nn.init.constant_(part.tokens.weight, 0.5)
    found = part(torch.tensor([[7]]), torch.tensor([[3]]))[0, 0]
    assert found[0].item() == pytest.approx(0.5 * 4 + math.sin(3), abs=1e-6)
    assert found[1].item() == pytest.approx(0.5 * 4 + math.cos(3), abs=1e-6)


def test_beams_share_the_position_of_their_source() -> None:
    part = embedding(positions="learned")
    found = part(torch.tensor([[3, 4, 5], [3, 4, 5]]), torch.tensor([[2], [6]]))
    torch.testing.assert_close(found[1] - found[0], (part.positions[6] - part.positions[2]).expand(3, -1))


# What a model is made of


def test_base_has_as_many_weights_as_the_paper_says() -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS["base"])
    square, wide, norm = 512 * 512 + 512, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    encoder, decoder = 4 * square + wide + 2 * norm, 8 * square + wide + 3 * norm
    assert sum(weight.numel() for weight in model.parameters()) == 6 * (encoder + decoder) + 32000 * 512


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_tables_are_one_where_the_config_says_so(share: bool, tie: bool) -> None:
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
    assert ((last - last_swapped).abs().amax(dim=-1) > 1e-6).all()  # rounding is 1e-14


@each_norm
def test_a_rotary_decoder_knows_distances_only(norm: str) -> None:
    model = small_model(norm=norm, positions="rotary", max_target=16)
    target = some_targets(5)
    found = stepped(model, target, write_slots, first_position=7)
    torch.testing.assert_close(found, teacher_forced(model, target), rtol=0, atol=1e-4)  # the table is in fp32


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
        assert not torch.isclose(model(source, mask, changed)[:, -1], before, rtol=1e-9).all(dim=-1).any()


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
        torch.testing.assert_close(logits[row : row + 1], model(alone, whole, target[:1]), rtol=0, atol=1e-9)
        torch.testing.assert_close(states[row : row + 1, :length], model.encode(alone, whole)[0], rtol=0, atol=1e-9)
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
            differs = ~torch.isclose(model(changed, mask, target), before, rtol=1e-9).all(dim=-1).all(dim=-1)
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
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]])


# Steps


def stepped(
    model: Transformer, target: Tensor, store: Store, first_slot: list[int] | None = None, first_position: int = 0
) -> Tensor:
    """The logits [B, T, V] of a target that is fed one token at a time."""
    batch, length = target.shape
    source, source_mask = some_sources(model)
    _, cross = model.encode(source, source_mask)
    offset = torch.tensor(first_slot or [0] * batch)
    slots = length + int(offset.max())
    cache = empty_cache(model, batch, slots, store)
    logits = []
    for t in range(length):
        index = torch.arange(t + 1 if store is append_slots else slots)
        self_mask = ((index >= offset[:, None]) & (index <= offset[:, None] + t))[:, None]  # [B, 1, L]
        position = torch.full((batch,), first_position + t)
        now, cache = model.decode_step(
            target[:, t : t + 1], position, offset + t, self_mask, source_mask, cross, cache, store
        )
        logits.append(now)
    return torch.cat(logits, dim=1)


def teacher_forced(model: Transformer, target: Tensor) -> Tensor:
    return model(*some_sources(model), target)


@each_store
@each_norm
@each_positions
def test_steps_equal_teacher_forcing(norm: str, positions: str, store: Store) -> None:
    model = small_model(norm=norm, positions=positions)
    target = some_targets(8)  # as long as the model goes
    torch.testing.assert_close(stepped(model, target, store), teacher_forced(model, target), rtol=0, atol=1e-9)


@each_store
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(map(str, variant)))
def test_steps_equal_teacher_forcing_in_every_variant(variant: dict[str, object], store: Store) -> None:
    model = small_model(**variant)
    target = some_targets(5)
    torch.testing.assert_close(stepped(model, target, store), teacher_forced(model, target), rtol=0, atol=1e-9)


def test_each_source_writes_at_its_own_slots() -> None:
    model = small_model(positions="rotary")
    target = some_targets(4)
    found = stepped(model, target, write_slots, first_slot=[3, 0, 5])
    torch.testing.assert_close(found, teacher_forced(model, target), rtol=0, atol=1e-9)


@each_positions
def test_each_source_stands_at_its_own_position(positions: str) -> None:
    model = small_model(positions=positions)
    target = some_targets(6)
    source, source_mask = some_sources(model)
    _, cross = model.encode(source, source_mask)
    cache = empty_cache(model, 3, 6, write_slots)
    for t in range(4):
        step(model, target[:, t], torch.full((3,), t), source_mask, cross, cache)
    at = torch.tensor([2, 0, 4])  # one source goes on; the others go back, and no longer see their later slots
    found = step(model, target[range(3), at], at, source_mask, cross, cache)
    expected = teacher_forced(model, target)[range(3), at]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def step(
    model: Transformer, tokens: Tensor, at: Tensor, source_mask: Tensor, cross: list[KeyValue], cache: list[KeyValue]
) -> Tensor:
    """Logits [B, V] of one token a source, each at its own place of a static cache."""
    self_mask = (torch.arange(cache[0][0].shape[2]) <= at[:, None])[:, None]
    return model.decode_step(tokens[:, None], at, at, self_mask, source_mask, cross, cache)[0][:, 0]


def test_the_static_cache_is_written_in_place_and_the_growing_one_is_not() -> None:
    model = small_model()
    source, source_mask = some_sources(model)
    _, cross = model.encode(source, source_mask)
    arguments = (some_targets(1), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    static = empty_cache(model, 3, 4, write_slots)
    first = torch.tensor([True, False, False, False]).expand(3, 1, 4)
    _, updated = model.decode_step(*arguments, first, source_mask, cross, static, write_slots)
    for old, new in zip(static, updated, strict=True):
        assert [tensor.data_ptr() for tensor in old] == [tensor.data_ptr() for tensor in new]
        assert (new[0][:, :, 0].abs() < 1e3).all()
        assert (new[0][:, :, 1:] == 1e3).all()
        assert (new[1][:, :, 1:] == -1e3).all()
    growing = empty_cache(model, 3, 4, append_slots)
    _, grown = model.decode_step(*arguments, first[..., :1], source_mask, cross, growing, append_slots)
    assert [tensor.shape[2] for pair in growing for tensor in pair] == [0] * 4
    assert [tensor.shape[2] for pair in grown for tensor in pair] == [1] * 4


# Beams


def beam_logits(model: Transformer, tokens: Tensor, masks: list[Tensor], store: Store) -> list[Tensor]:
    """Logits [B, K, V] of every step of a tree: tokens [T, B, K], masks [B, K, (t + 1) * K] over the slots so far."""
    steps, batch, beams = tokens.shape
    source, source_mask = some_sources(model)
    _, cross = model.encode(source, source_mask)
    cache = empty_cache(model, batch, steps * beams, store)
    found = []
    for t in range(steps):
        unwritten = 0 if store is append_slots else (steps - t - 1) * beams
        self_mask = nn.functional.pad(masks[t], (0, unwritten))
        at = torch.full((batch,), t)
        logits, cache = model.decode_step(tokens[t], at, at * beams, self_mask, source_mask, cross, cache, store)
        found.append(logits)
    return found


@each_store
@each_norm
@each_positions
def test_a_tree_by_hand(norm: str, positions: str, store: Store) -> None:
    model = small_model(norm=norm, positions=positions)
    # Slots, three a step:   0 1 2 are the start token, one for each beam
    #                        3 4 5 say 4 5 6, all of them children of 0
    #                        6 7 8 say 7 8 9, children of 4, 3 and 4
    tokens = torch.tensor([[START] * 3, [4, 5, 6], [7, 8, 9]])
    looks = [[{0}, {1}, {2}], [{0, 3}, {0, 4}, {0, 5}], [{0, 4, 6}, {0, 3, 7}, {0, 4, 8}]]
    masks = [
        torch.tensor([[slot in beam for slot in range(3 * t + 3)] for beam in beams]).expand(3, -1, -1)
        for t, beams in enumerate(looks)
    ]
    found = beam_logits(model, tokens[:, None].expand(-1, 3, -1), masks, store)
    for beam, path in enumerate([[START, 5, 7], [START, 4, 8], [START, 5, 9]]):
        expected = teacher_forced(model, torch.tensor([path] * 3))
        torch.testing.assert_close(found[2][:, beam], expected[:, 2], rtol=0, atol=1e-9)


@each_store
@settings(max_examples=15, deadline=None)
@given(
    variant=st.sampled_from([(norm, positions) for norm in NORMS for positions in POSITIONS]),
    steps=st.integers(1, 8),
    beams=st.integers(1, 4),
    seed=seeds,
)
def test_every_beam_of_a_random_tree_equals_its_own_path(
    variant: tuple[str, str], steps: int, beams: int, seed: int, store: Store
) -> None:
    model = small_model(norm=variant[0], positions=variant[1])
    batch = 3  # each source has a tree of its own
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (steps, batch, beams), generator=generator)
    parents = torch.randint(0, beams, (steps, batch, beams), generator=generator)
    paths = [[[] for _ in range(beams)] for _ in range(batch)]  # slots from the root to every beam
    found_paths, masks = [], []
    for t in range(steps):
        paths = [
            [(row[parents[t, b, k]] if t else []) + [t * beams + k] for k in range(beams)]
            for b, row in enumerate(paths)
        ]
        found_paths.append(paths)
        mask = torch.zeros(batch, beams, (t + 1) * beams, dtype=torch.bool)
        for b in range(batch):
            for k in range(beams):
                mask[b, k, paths[b][k]] = True
        masks.append(mask)
    found = beam_logits(model, tokens, masks, store)
    said = tokens.transpose(0, 1).flatten(1)  # [B, T * K]: the token of every slot
    for t, k in [(t, k) for t in range(steps) for k in range(beams)]:
        path = torch.stack([said[b, found_paths[t][b][k]] for b in range(batch)])
        torch.testing.assert_close(found[t][:, k], teacher_forced(model, path)[:, t], rtol=0, atol=1e-9)


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
    torch.testing.assert_close(found[mask], states[mask], rtol=0, atol=1e-11)
    decoded = twin.decoder(
        model.target_embedding(target, torch.arange(6)[None]),
        states.masked_fill(~mask[..., None], 0.0),  # what torch leaves in the padding is nobody's business
        tgt_mask=torch.ones(6, 6, dtype=torch.bool).triu(1),
        memory_key_padding_mask=~mask,
    )
    expected = decoded @ model.output.weight.T
    torch.testing.assert_close(model(source, mask, target), expected, rtol=0, atol=1e-10)
