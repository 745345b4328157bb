"""Rewrites the portable graphs into the fused operators of the kernel library, for ONNX Runtime on the CPU."""
