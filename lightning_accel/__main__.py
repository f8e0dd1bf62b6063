"""The ``lightning-accel`` command; also ``python -m lightning_accel``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

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
from lightning_accel.cli.exit_codes import FAILED, ended

_EXAMINES = "What this machine has, what a run here goes without, and the command that brings each missing package."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that ``argv`` (if None, the process's own arguments) names; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] and given[0] in _WITH_ANOTHER_PARSER:
        return _WITH_ANOTHER_PARSER[given[0]](given[1:])
    arguments = _parser().parse_args(plan_command.with_values(given))
    runs_users_code = getattr(arguments, "runs_users_code", False)
    return ended(arguments.subcommand, lambda: int(arguments.handler(arguments)), runs_users_code=runs_users_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-accel", description="Tools around lightning-accel.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", required=True)
    doctor = subcommands.add_parser(
        "doctor", help="what this machine has, what is missing and how to get it", description=_EXAMINES
    )
    doctor.set_defaults(handler=_doctor)
    plan_command.add_parser(subcommands)
    claims_command.add_parser(subcommands)
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
    return parser


def _doctor(_: argparse.Namespace) -> int:
    from lightning_accel.cli.doctor import examine, show  # imported late: --help and plan run without torch

    show(examine())
    return 0


def _tune(given: Sequence[str]) -> int:
    """Runs ``tune`` with the options of Lightning's command line, which takes seconds to import."""
    if not _names_model(given) and not {"-h", "--help"} & {*given}:
        print(
            "lightning-accel tune: no class of a model is named: neither in --config FILE, as model: {class_path: ...},"
            " nor by --model. If a program names it, as AccelCLI(MyModel) does, run: python train.py tune",
            file=sys.stderr,
        )
        return FAILED
    from lightning_accel.cli.accel_cli import AccelCLI

    sys.path.insert(0, "")  # so that the classes that the configuration names can be imported
    sys.argv[:] = ["lightning-accel", "tune", *given]
    AccelCLI()
    return 0


def _names_model(given: Sequence[str]) -> bool:
    """Returns whether the options or their configuration name a model. True, too, if a configuration cannot be read."""
    if any(argument.startswith("--model") for argument in given):
        return True
    values = (argument.partition("=")[2] or argument for argument in given)
    for path in (Path(value) for value in values if value.endswith((".yaml", ".yml", ".json"))):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return True  # the parser will report the fault of this file
        sections = [content, content.get("tune")] if isinstance(content, dict) else []
        models = [section.get("model") for section in sections if isinstance(section, dict)]
        if any("class_path" in model if isinstance(model, dict) else model for model in models):
            return True
    return False


_WITH_ANOTHER_PARSER: dict[str, Callable[[Sequence[str]], int]] = {
    "tune": _tune,
    "run": run_command.run,
    "bench": bench_command.run,
}
"""The commands that also take options of the user's own program."""


if __name__ == "__main__":
    sys.exit(main())
