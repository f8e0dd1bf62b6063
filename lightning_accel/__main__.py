"""The ``lightning-accel`` command; also ``python -m lightning_accel``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_accel import __version__
from lightning_accel.claims import command as claims_command
from lightning_accel.cli import (
    bench_command,
    cache_command,
    compare_command,
    deploy_command,
    export_command,
    plan_command,
    report_command,
    run_command,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that ``argv`` (by default the process's own arguments) names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lightning-accel", description="Tools around lightning-accel.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", required=True)
    subcommands.add_parser("doctor", help="what this machine has, what is missing and how to get it")
    plan = plan_command.add_parser(subcommands)
    claims = claims_command.add_parser(subcommands)
    cache_command.add_parser(subcommands)
    compare_command.add_parser(subcommands)
    report_command.add_parser(subcommands)
    export_command.add_parser(subcommands)
    deploy_command.add_parser(subcommands)
    subcommands.add_parser(
        "tune", help="the fastest settings for a run that a configuration describes, into accel.yaml"
    )
    subcommands.add_parser("run", help="a program, started with the allocator that wins on this machine")
    subcommands.add_parser("bench", help="a training of this working tree beside that of another revision")
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["tune"]:
        # Its options are those of Lightning's command line, which takes seconds to import.
        from lightning_accel.cli.accel_cli import AccelCLI

        sys.path.insert(0, "")  # where the classes are that the configuration names
        sys.argv[1:] = given
        AccelCLI()
        return 0
    if given[:1] == ["run"]:
        return run_command.run(given[1:])
    if given[:1] == ["bench"]:
        return bench_command.run(given[1:])
    arguments = parser.parse_args(plan_command.with_values(given))
    if arguments.subcommand == "plan":
        try:
            plan_command.show(arguments)
        except ValueError as error:
            plan.error(str(error))
        return 0
    if arguments.subcommand == "cache":
        cache_command.run(clear=arguments.clear)
        return 0
    if arguments.subcommand == "compare":
        return compare_command.run(arguments)
    if arguments.subcommand == "report":
        return report_command.run(arguments)
    if arguments.subcommand == "export":
        return export_command.run(arguments)
    if arguments.subcommand == "deploy":
        return deploy_command.run(arguments)
    if arguments.subcommand == "claims":
        try:
            return claims_command.run(arguments)
        except ValueError as error:
            claims.error(str(error))

    # Imported late: --help and plan answer without torch.
    from lightning_accel.cli.doctor import examine, show

    show(examine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
