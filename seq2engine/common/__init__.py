"""Helpers that all stages use: files, progress, tables, report pages."""
