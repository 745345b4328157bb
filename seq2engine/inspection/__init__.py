"""What `inspect` tells of a bundle, as text and as a page."""
