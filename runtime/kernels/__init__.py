"""Fused operators for ONNX Runtime on the CPU, in C: products and what follows them, attention, best tokens."""
