"""The forms of the portable graphs that ONNX Runtime sessions run."""
