"""Proves that a backend computes and decodes what the model in float64 does; gates hold thresholds in CI."""
