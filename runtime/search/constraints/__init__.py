"""Constrained decoding: phrases an output must contain, prefix trees it must follow, timestamps of speech."""
