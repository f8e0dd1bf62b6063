"""Experiments: comparisons of A against B, and the storage of their results."""
