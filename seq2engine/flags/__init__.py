"""Flags that several commands share: lists, precisions, search options."""
