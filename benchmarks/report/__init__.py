"""A benchmark result as tables, charts and one HTML page."""
