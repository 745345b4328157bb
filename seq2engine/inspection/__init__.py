"""What `inspect` shows of a bundle, as text and as a page."""
