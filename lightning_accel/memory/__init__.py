"""The memory of a training step and ways to reduce it: saved tensors, recomputation, budgets."""
