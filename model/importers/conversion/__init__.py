"""What importers do to weights: rename tables, position tables, repairs before a rename."""
