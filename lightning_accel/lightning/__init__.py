"""Integration of the techniques into Lightning runs."""
