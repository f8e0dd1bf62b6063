"""What keeps a run alive: checkpoints written whole, ranks that are lost, jobs that are requeued."""
