"""Tuning before a run: short trainings in separate processes settle what cannot change during a run."""
