"""A model around torch.nn.Transformer: what imported checkpoints are compared with, written by other people."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seq2engine.errors import CheckpointError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.transformer import Transformer
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import SearchOptions
from support.rounding import double_error

torch.backends.mha.set_fastpath_enabled(False)  # in it, padding comes out as zeros and the sums in another order


class Reference(nn.Module):
    """Embeddings, positions, nn.Transformer and an output projection, all with random weights."""

    def __init__(
        self,
        d_model: int = 16,
        heads: int = 4,
        d_ff: int = 24,
        layers: tuple[int, int] = (2, 2),
        vocab: tuple[int, int] = (30, 30),
        norm_first: bool = False,
        final_norms: bool = False,
        activation: str = "relu",
        epsilon: float = 1e-5,
        bias: bool = True,
        output_bias: bool = False,
        share: bool = False,
        tie: bool = False,
        scale: bool = True,
        embedding_norm: bool = False,
        positions: tuple[Tensor, Tensor] | None = None,
        end: int = 2,
        seed: int = 0,
    ):
        super().__init__()
        shape = (d_model, heads, d_ff, 0.0, activation, epsilon, True, norm_first, bias)
        encoder_norm, decoder_norm = (nn.LayerNorm(d_model, epsilon, bias=bias) if final_norms else None for _ in "ed")
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(*shape), layers[0], encoder_norm, False)
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*shape), layers[1], decoder_norm)
        self.transformer = nn.Transformer(
            d_model, heads, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
        )
        self.source = nn.Embedding(vocab[0], d_model)
        self.target = self.source if share else nn.Embedding(vocab[1], d_model)
        self.output = nn.Linear(d_model, vocab[1], bias=output_bias)
        self.source_norm = nn.LayerNorm(d_model, epsilon) if embedding_norm else nn.Identity()
        self.target_norm = nn.LayerNorm(d_model, epsilon) if embedding_norm else nn.Identity()
        self.scale = d_model**0.5 if scale else 1.0
        generator = torch.Generator().manual_seed(seed)
        tables = positions or tuple(torch.randn(24, d_model, generator=generator) for _ in "st")
        self.source_positions, self.target_positions = (nn.Parameter(table.clone()) for table in tables)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith("positions"):
                    continue
                spread = 1.5 * weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.1
                if "norm" in name and name.endswith("weight"):
                    spread = 1.0  # norms that turn signs around: else a tied model repeats what it is fed
                weight.normal_(0.0, spread, generator=generator)
            for layer in decoder.layers:
                layer.multihead_attn.out_proj.weight *= 0.5
            if tie:
                self.output.weight = self.target.weight
            self.output.weight[end] *= 2
        self.eval()

    def states(self, source: Tensor, mask: Tensor) -> Tensor:
        x = self.source_norm(self.source(source) * self.scale + self.source_positions[: source.shape[1]])
        return self.transformer.encoder(x, src_key_padding_mask=~mask)

    def logits(self, states: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        x = self.target_norm(self.target(target) * self.scale + self.target_positions[:length])
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.output(
            self.transformer.decoder(x, states, tgt_mask=future, memory_key_padding_mask=~mask, tgt_is_causal=False)
        )

    @torch.no_grad()
    def greedy(self, sources: Sequence[Sequence[int]], start: int, end: int, longest: int) -> list[tuple[int, ...]]:
        """The plainest loop: all of the target again for every token."""
        source, mask = ragged(sources)
        states = self.states(source, mask)
        outputs = torch.full((len(sources), 1), start)
        for _ in range(longest):
            best = self.logits(states, mask, outputs)[:, -1].argmax(dim=-1)
            outputs = torch.cat((outputs, best[:, None]), dim=1)
        rows = [row[1:] for row in outputs.tolist()]
        return [tuple(row[: row.index(end) + 1] if end in row else row) for row in rows]


def ragged(sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, S]; the padding is a token like any other, which no result may depend on."""
    longest = max(map(len, sources))
    ids = torch.tensor([[*source, *[3] * (longest - len(source))] for source in sources])
    return ids, torch.tensor([[True] * len(source) + [False] * (longest - len(source)) for source in sources])


def some_sources(vocab: int, longest: int, last: int | None = None, count: int = 7) -> list[list[int]]:
    """Ragged sources, from the shortest to the longest there may be; `last` ends each of them."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, longest, *torch.randint(2, longest, (count - 2,), generator=generator).tolist()]
    rows = [torch.randint(4, vocab, (length,), generator=generator).tolist() for length in lengths]
    return rows if last is None else [[*row[:-1], last] for row in rows]


def lively_reference(
    start: int, end: int, longest: int, last: int | None = None, seed: int = 0, **options: Any
) -> Reference:
    """The first of many random models that emits several tokens, of several lengths; else any would look right.

    `seed` is where to begin: a test that knows which one it will be saves the search.
    """
    for number in range(seed, 100):
        reference = Reference(end=end, seed=number, **options)
        sources = some_sources(reference.source.num_embeddings, longest, last)
        outputs = copy.deepcopy(reference).double().greedy(sources, start, end, longest)
        if len({token for row in outputs for token in row}) > 5 and len({len(row) for row in outputs}) > 2:
            return reference
    raise AssertionError("every model repeats itself")


@torch.no_grad()
def largest_difference(reference: Reference, model: Transformer, sources: Sequence[Sequence[int]]) -> float:
    """Between the two models in float64: encoder states and teacher-forced logits, where there is a source token.

    In units of what rounding may put between them.
    """
    source, mask = ragged(sources)
    target = torch.randint(0, model.config.target_vocab, (len(sources), model.config.max_target))
    rounded = model.encode(source, mask)[0][mask], model(source, mask, target)
    reference, model = copy.deepcopy(reference).double(), copy.deepcopy(model).double()
    states = reference.states(source, mask)
    theirs = states[mask], reference.logits(states, mask, target)
    ours = model.encode(source, mask)[0][mask], model(source, mask, target)
    return max(
        (a - b).abs().max().item() / double_error(fp32, a) for fp32, a, b in zip(rounded, ours, theirs, strict=True)
    )


def assert_same_model(reference: Reference, model: Transformer, folder: Path, last: int | None = None) -> None:
    """Same numbers in float64, same greedy decodes in PyTorch and, exported, in ONNX Runtime."""
    config = model.config
    sources = some_sources(config.source_vocab, config.max_source, last)
    assert largest_difference(reference, model, sources) < 1
    expected = copy.deepcopy(reference).double().greedy(sources, config.start_id, config.end_id, config.max_target)
    assert len(set(expected)) > 2
    bundle = onnx_from_model(model, folder, ("fp32",))
    for backend in ("torch", "onnxruntime"):
        with open_session(bundle, backend, threads=1) as session:
            found = generate(session, sources, SearchOptions(max_length=config.max_target))
        assert [best[0].tokens for best in found] == expected


def refusal_of(read: Callable[[Path], object], source: Path) -> str:
    """The one line with which an importer refuses a source."""
    with pytest.raises(CheckpointError) as caught:
        read(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)
