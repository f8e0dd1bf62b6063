"""One training step: which layers stand around it, and in which order."""
