"""Builds, caches, plans, refits and inspects TensorRT engines."""
