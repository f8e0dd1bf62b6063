"""Live trials: which of the plan's edits are worth their place is decided on the run's own training steps."""
