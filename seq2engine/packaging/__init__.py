"""Makes the package that builds, checks and runs engines on a GPU machine without seq2engine."""
