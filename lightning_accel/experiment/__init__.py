"""Experiments: every comparison of A against B, and what is kept of them."""
