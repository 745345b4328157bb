"""Encoder-decoder Transformers from PyTorch to ONNX and TensorRT, proven to say the same thing, faster."""

__version__ = "0.1.0"
