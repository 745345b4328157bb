"""Locates the first wrong tensor inside the graphs after a failed parity run: its layer and its cause."""
