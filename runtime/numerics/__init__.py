"""How far two computations of the same tensor may lie apart, and teacher forcing to measure it."""
