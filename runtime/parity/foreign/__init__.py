"""Graphs of other exporters, compared with our reference of the same checkpoint."""
