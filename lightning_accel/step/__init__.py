"""One training step: its layers and their order."""
