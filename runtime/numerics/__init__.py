"""Error budgets, the unit that errors are measured in, and teacher forcing to measure them."""
