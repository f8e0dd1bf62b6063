"""Where the techniques meet a Lightning run."""
