"""Other libraries that decode the same model, each in a process and an environment of its own."""
