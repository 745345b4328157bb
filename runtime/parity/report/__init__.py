"""A parity result as a table, plots and one HTML page."""
