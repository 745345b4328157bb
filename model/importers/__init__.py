"""Checkpoints of other libraries become the reference model."""
