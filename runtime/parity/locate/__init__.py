"""Finds the first wrong tensor of a failed parity run, its layer and its cause."""
