"""Serving: requests that come at any time from many clients are decoded together, by continuous batching."""
