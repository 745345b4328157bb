"""Steps of a search over a session: one by one over a tree of beams, or several at a time."""
