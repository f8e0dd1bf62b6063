"""Resilience of runs: atomic checkpoints, detection of lost ranks, requeued jobs."""
