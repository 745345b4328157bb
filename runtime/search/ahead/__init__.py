"""Searches whose steps a session makes by itself, many in one call: their plans, and what the session gives back."""
