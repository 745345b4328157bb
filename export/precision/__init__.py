"""Typed graphs: fp16, bf16, quantised weights, fp32 fallback nodes, and the census that checks them."""
