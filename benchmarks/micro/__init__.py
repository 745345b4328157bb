"""Micro-benchmarks for pytest-benchmark: one part of a decode each."""
