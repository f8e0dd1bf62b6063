"""Where the package meets Lightning's strategies."""
