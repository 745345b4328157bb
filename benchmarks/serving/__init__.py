"""Load on a server: throughput and latency of continuous batching beside batches that are decoded as a whole."""
