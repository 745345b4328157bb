"""Accounts for every number and every node of a bundle's graphs, from the reference's tensors, without running them."""
