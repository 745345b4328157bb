"""A real model and real sentences, fetched from the package registry."""
