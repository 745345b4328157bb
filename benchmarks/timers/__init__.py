"""What is timed on every arm; the arms take turns."""
