"""The commands that put a model into service: an HTTP server, a Triton model repository."""
