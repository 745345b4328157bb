"""Files of weights as named tensors: safetensors, and pickles that are never executed."""
