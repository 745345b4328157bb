"""Audio in, text with times out: features, prompts, windows of 30 s, fallback to sampling, words, subtitle formats."""
