"""The server described as OpenAPI, and the same as a page that needs nothing from the internet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seq2engine.common.page import page_from_template
from seq2engine.runtime.serving.fields import FIELDS, MOST_TEXTS

PACKAGE = "seq2engine.serving"
ERRORS = {
    "400": "The body is not a JSON object.",
    "401": "The bearer token is missing or wrong.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "422": "The request cannot be decoded; the message says why.",
    "429": "Too many requests are waiting; try again later.",
    "503": "The server is stopping.",
    "504": "The request timed out.",
}
OUTPUT = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "score": {"type": "number"},
        "log_probs": {"type": "array", "items": {"type": "number"}},
        "tokens": {"type": "array", "items": {"type": "integer"}},
    },
}
RESULT = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "The best output."},
        "outputs": {"type": "array", "items": OUTPUT},
        "unknown": {"type": "array", "items": {"type": "string"}, "description": "What the model has no token for."},
        "error": {"type": "string", "description": "Why this text was not decoded; the others were."},
    },
}
ANSWER = {
    "type": "object",
    "properties": {"results": {"type": "array", "items": RESULT}, "seconds": {"type": "number"}},
}
EVENTS = (
    "With `stream`: events `piece` {index, text}, `result` {index, ...} for every text, `done` {seconds}, or `error` "
    "{error, status}. With several beams or samples there are no pieces, because an output may change until it ends."
)


TEXTS = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_TEXTS},
    ],
    "description": "A text, or a list of texts.",
}
REQUEST = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": TEXTS, **{name: field.schema for name, field in FIELDS.items()}},
    "additionalProperties": False,
}
ATTENTION_REQUEST = {
    "type": "object",
    "required": ["text", "tokens"],
    "properties": {
        "text": {"type": "string"},
        "tokens": {"type": "array", "items": {"type": "integer"}, "description": "Of one output, from /translate."},
        "source_language": FIELDS["source_language"].schema,
    },
    "additionalProperties": False,
}
ATTENTION_ANSWER = {
    "type": "object",
    "properties": {
        "source": {"type": "array", "items": {"type": "string"}},
        "target": {"type": "array", "items": {"type": "string"}},
        "weights": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "html": {"type": "string", "description": "The same as a heat map."},
    },
}


def openapi(name: str, version: str, protected: bool) -> dict[str, Any]:
    translate = operation("Decode texts.", EVENTS, REQUEST, ANSWER)
    about = ("Cross-attention weights of one output.", "Mean of all layers and heads.")
    translate["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"seq2engine: {name}", "version": version},
        "paths": {
            "/translate": {"post": translate},
            "/attention": {"post": operation(*about, ATTENTION_REQUEST, ATTENTION_ANSWER)},
            "/health/live": {"get": plain("The process runs.", "text/plain")},
            "/health/ready": {"get": {**plain("The server accepts requests.", "text/plain")}},
            "/metrics": {"get": plain("Prometheus metrics.", "text/plain")},
            "/openapi.json": {"get": plain("This description.", "application/json")},
        },
    }
    if protected:
        described["components"] = {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}}
        described["security"] = [{"bearer": []}]
    return described


def operation(summary: str, about: str, request: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    error = {"type": "object", "properties": {"error": {"type": "string"}}}
    refused = {
        code: {"description": what, "content": {"application/json": {"schema": error}}} for code, what in ERRORS.items()
    }
    return {
        "summary": summary,
        "description": about,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": answer}}},
            **refused,
        },
    }


def plain(summary: str, kind: str) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": summary, "content": {kind: {"schema": {"type": "string"}}}}}
    return {"summary": summary, "responses": responses}


def docs_html(described: Mapping[str, Any]) -> str:
    """The description as a page."""
    calls = [
        (method.upper(), path, call) for path, methods in described["paths"].items() for method, call in methods.items()
    ]
    values = {
        "title": described["info"]["title"],
        "subtitle": "Requests and responses of this server; machine-readable: /openapi.json",
        "calls": calls,
        "fields_of": fields_of,
        "errors": list(ERRORS.items()),
    }
    return page_from_template(PACKAGE, "docs.html", values)


def fields_of(call: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, type and description of every field of a call's body."""
    if "requestBody" not in call:
        return []
    schema = call["requestBody"]["content"]["application/json"]["schema"]
    return [
        (name + (" (required)" if name in schema["required"] else ""), kind_of(field), field.get("description", ""))
        for name, field in schema["properties"].items()
    ]


def kind_of(field: Mapping[str, Any]) -> str:
    if "oneOf" in field:
        return " or ".join(kind_of(one) for one in field["oneOf"])
    kind = field["type"]
    return f"list of {field['items']['type']}s" if kind == "array" else str(kind)
