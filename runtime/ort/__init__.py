"""ONNX Runtime: sessions, their memory, execution providers and speculative decoding."""
