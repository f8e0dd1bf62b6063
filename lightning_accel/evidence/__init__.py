"""What a run leaves behind, and what can be told from it: records, and runs beside each other."""
