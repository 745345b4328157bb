"""TensorRT: engines run on a GPU, their memory, shapes and the choice among several."""
