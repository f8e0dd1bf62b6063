"""Experiments: A beside B, in an order by a fair coin; the numbers, the times, and the rules that judge them."""
