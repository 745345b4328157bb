"""Mutated files and command lines, each run in a process of its own that is watched; see tests/fuzz/campaign.py."""
