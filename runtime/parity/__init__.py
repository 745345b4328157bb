"""Parity: does a backend compute and decode what the model in fp64 does? With reports, and gates for CI."""
