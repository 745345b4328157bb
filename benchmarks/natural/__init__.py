"""Real sentences decoded to their own ends: speed and quality of every arm side by side."""
