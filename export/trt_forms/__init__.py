"""The form of the decoder step from which TensorRT engines are built."""
