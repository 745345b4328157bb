"""Greedy search, beam search and sampling over one decoder step; knows nothing of models, caches or text."""
