"""Foundations of all other parts: reversible edits, snapshots, clocks, the report, facts about the machine."""
