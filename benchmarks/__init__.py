"""Latency and throughput, measured interleaved, with outputs checked equal first."""
