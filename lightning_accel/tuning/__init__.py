"""Live trials: the run's own training steps decide which of the plan's edits stay."""
