"""Trains the reference model with cross-entropy on pairs of texts."""
