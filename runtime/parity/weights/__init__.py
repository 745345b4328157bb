"""Traces every number and node of a bundle's graphs to the reference's tensors, without running them."""
