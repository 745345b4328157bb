"""A PyTorch model becomes ONNX graphs and TensorRT engines."""
