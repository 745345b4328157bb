"""Text to token ids and back, for each kind of tokenizer file."""
