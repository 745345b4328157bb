"""Runs a bundle: sessions of every backend, the decode loop over them, text, parity."""
