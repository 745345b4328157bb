"""The reference Transformer, its checkpoints, training, tokenizers and importers."""
