"""What everything else is built on: edits that can be undone, trials, the report, the machine."""
