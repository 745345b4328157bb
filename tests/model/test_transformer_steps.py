"""Steps with a cache, of one beam and of many, equal teacher forcing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_transformers import (
    NORMS,
    POSITIONS,
    START,
    VARIANTS,
    VOCAB,
    assert_same_numbers,
    each_norm,
    each_positions,
    each_store,
    empty_cache,
    seeds,
    small_model,
    some_sources,
    some_targets,
    stepped,
    teacher_forced,
)
from torch import Tensor, nn

from seq2engine.model.layers import KeyValue, Store, append_slots, write_slots
from seq2engine.model.transformer import Transformer

# Steps


@each_store
@each_norm
@each_positions
def test_steps_equal_teacher_forcing(norm: str, positions: str, store: Store) -> None:
    model = small_model(norm=norm, positions=positions)
    target = some_targets(8)  # as long as the model goes
    assert_same_numbers(model, stepped(model, target, store), teacher_forced(model, target))


@each_store
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(map(str, variant)))
def test_steps_equal_teacher_forcing_in_every_variant(variant: dict[str, object], store: Store) -> None:
    model = small_model(**variant)
    target = some_targets(5)
    assert_same_numbers(model, stepped(model, target, store), teacher_forced(model, target))


def test_each_source_writes_at_its_own_slots() -> None:
    model = small_model(positions="rotary")
    target = some_targets(4)
    found = stepped(model, target, write_slots, first_slot=[3, 0, 5])
    assert_same_numbers(model, found, teacher_forced(model, target))


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
    assert_same_numbers(model, found, expected)


def step(
    model: Transformer, tokens: Tensor, at: Tensor, source_mask: Tensor, cross: list[KeyValue], cache: list[KeyValue]
) -> Tensor:
    """Logits [B, V] of one token a source, each at its own place of a static cache."""
    self_mask = (torch.arange(cache[0][0].shape[2]) <= at[:, None])[:, None]
    slots = torch.arange(cache[0][0].shape[2])[None]
    arguments = tokens[:, None], at, at, self_mask, source_mask, cross, cache
    return model.decode_step(*arguments, slot_position=slots)[0][:, 0]


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
        slots = torch.arange(self_mask.shape[-1])[None] // beams
        logits, cache = model.decode_step(tokens[t], at, at * beams, self_mask, source_mask, cross, cache, store, slots)
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
        assert_same_numbers(model, found[2][:, beam], expected[:, 2])


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
    slot_tokens = tokens.transpose(0, 1).flatten(1)  # [B, T * K]: the token of every slot
    for t, k in [(t, k) for t in range(steps) for k in range(beams)]:
        path = torch.stack([slot_tokens[b, found_paths[t][b][k]] for b in range(batch)])
        assert_same_numbers(model, found[t][:, k], teacher_forced(model, path)[:, t])
