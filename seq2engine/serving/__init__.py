"""The HTTP server: its JSON and event streams, limits, metrics, OpenAPI and the page to try a model."""
