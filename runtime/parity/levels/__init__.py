"""The levels of a parity run, from the graphs over single tensors to whole decodes, and their results."""
