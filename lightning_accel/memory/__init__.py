"""Where the memory of a training step goes, and how to need less: saved tensors, recomputation, budgets."""
