"""Conversion of weights: rename tables, position tables, fixes before a rename."""
