"""Triton Inference Server: writes a model repository of a bundle, and is the Python backend model inside it."""
