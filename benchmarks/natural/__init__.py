"""Real sentences, each decoded to its end token: speed and quality of every arm."""
