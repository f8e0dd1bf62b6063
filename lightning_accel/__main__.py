"""The ``lightning-accel`` command; also ``python -m lightning_accel``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that ``argv`` (by default the process's own arguments) names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lightning-accel", description="Tools around lightning-accel.")
    subcommands = parser.add_subparsers(dest="subcommand", required=True)
    subcommands.add_parser("doctor", help="what this machine has, what is missing and how to get it")
    parser.parse_args(argv)

    # Imported late: --help answers before torch has loaded.
    from lightning_accel.doctor import examine, show

    show(examine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
