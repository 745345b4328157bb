"""The shipped model (graphemes to phonemes) and what makes its data."""
