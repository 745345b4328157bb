"""Images to text: pictures become pixels, and pixels text."""
