"""Load tests: throughput and latency of continuous batching compared with whole batches."""
