"""`AccelCLI` and the subcommands of `lightning-accel`."""
