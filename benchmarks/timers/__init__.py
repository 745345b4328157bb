"""What is timed on every arm, in turns."""
