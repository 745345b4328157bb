"""ONNX Runtime: sessions, their memory, execution providers, calibration and speculative decoding."""
