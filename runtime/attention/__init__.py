"""Cross-attention weights of one sentence pair, compared with the reference and drawn."""
