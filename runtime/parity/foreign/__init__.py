"""Graphs that another exporter made of the same checkpoint, held against our reference."""
