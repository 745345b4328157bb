"""Text and token ids, in and out: lines, batching, continuous batching, scoring."""
