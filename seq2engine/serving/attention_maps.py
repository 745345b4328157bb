"""Cross-attention weights for the server: one output at a time, on a separate session that is opened on first use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from seq2engine.common.heat_map import cells_html
from seq2engine.errors import RequestError, SessionError
from seq2engine.runtime.attention.report import fitted
from seq2engine.runtime.attention.view import weights_of
from seq2engine.runtime.opening import open_session
from seq2engine.runtime.session import Session
from seq2engine.runtime.text.scoring import problem_with
from seq2engine.runtime.translator import Translator


class AttentionMaps:
    """The weights of outputs that the server has decoded. ONNX Runtime computes them, whichever backend serves."""

    def __init__(self, model: Translator):
        self.model = model
        self.lock = threading.Lock()
        self.session: Session | None = None

    def opened(self) -> Session:
        if self.session is None:
            try:
                self.session = open_session(
                    self.model.bundle, "onnxruntime", self.model.session.precision, self.model.threads, attention=True
                )
            except SessionError as error:
                raise RequestError(f"no attention weights of this model: {error}") from error
        return self.session

    def weights(self, text: str, tokens: Sequence[int], source_language: str | None) -> dict[str, Any]:
        """Labels and the mean weights [T,S] of all layers and heads, also as the HTML of a heat map."""
        model, config = self.model, self.model.session.config
        source = model.tokenizer.encode_source(text, source_language)
        problems = [
            problem_with("target", tuple(tokens), config.max_target, config.target_vocab),
            problem_with("source", tuple(source), model.session.limits.source, config.source_vocab),
        ]
        if problem := next(filter(None, problems), None):
            raise RequestError(problem)
        with self.lock:
            weights = weights_of(self.opened(), source, tuple(tokens), model.options())
        mean = weights.mean(axis=(0, 1))
        columns, rows = model.source_labels(source), model.labels.target_tokens(tokens)
        cell = fitted(720, len(columns), 13, 44)
        return {
            "source": columns,
            "target": rows,
            "weights": mean.astype(float).round(6).tolist(),
            "html": str(cells_html(mean, rows, columns, "attends to", cell, labelled=True)),
        }

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
