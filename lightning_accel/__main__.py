"""The ``lightning-accel`` command; also ``python -m lightning_accel``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from lightning_accel import __version__
from lightning_accel.claims.command import claims
from lightning_accel.cli import bench_command, run_command
from lightning_accel.cli.cache_command import cache
from lightning_accel.cli.command import FAILED, Command
from lightning_accel.cli.compare_command import compare
from lightning_accel.cli.deploy_command import deploy
from lightning_accel.cli.export_command import EPILOG, export_checkpoint
from lightning_accel.cli.plan_command import plan, with_values
from lightning_accel.cli.report_command import report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that ``argv`` (if None, the process's own arguments) names; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] and given[0] in _WITH_ANOTHER_PARSER:
        return _WITH_ANOTHER_PARSER[given[0]](given[1:])
    options = _parser().parse_args(with_values(given))
    return _COMMANDS[options.subcommand].run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-accel", description="Tools around lightning-accel.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", required=True)
    for name, command in _COMMANDS.items():
        command.add_to(subcommands, name)
    subcommands.add_parser(
        "tune", help="the fastest settings for a run that a configuration describes, into accel.yaml"
    )
    subcommands.add_parser("run", help="a program, started with the allocator that wins on this machine")
    subcommands.add_parser("bench", help="a training of this working tree beside that of another revision")
    return parser


def _doctor() -> int:
    """What this machine has, what a run here goes without, and the command that brings each missing package."""
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


_COMMANDS = {
    "doctor": Command(_doctor, "what this machine has, what is missing and how to get it"),
    "plan": Command(plan, "memory per device by strategy, for a model of some size"),
    "claims": Command(claims, "what articles promise of PyTorch's speed, measured on this machine"),
    "cache": Command(cache, "what earlier runs have settled, and later ones begin with"),
    "compare": Command(compare, "two runs beside each other: speed, memory, loss, settings"),
    "report": Command(
        report, "one page on a run: where its time and memory went, what was done about it, what to do next"
    ),
    "export": Command(
        export_checkpoint,
        "a checkpoint as a file that is served: ONNX, a compiled package, TensorRT",
        epilog=EPILOG,
        runs_users_code=True,
    ),
    "deploy": Command(
        deploy,
        "a checkpoint in several forms: latency, throughput, size, accuracy; one is recommended",
        runs_users_code=True,
    ),
}

_WITH_ANOTHER_PARSER: dict[str, Callable[[Sequence[str]], int]] = {
    "tune": _tune,
    "run": run_command.run,
    "bench": bench_command.run,
}
"""The commands that also take options of the user's own program."""


if __name__ == "__main__":
    sys.exit(main())
