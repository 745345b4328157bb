"""Conversion of weights and settings: rename tables, position tables, fixes before a rename, image processors."""
