"""``AccelPlugin()`` beside its rivals on a GPU: :mod:`rivals` in sizes that are worth one.

    LIMIT_S=5400 make gpu-bench PYTHON=python3 ONLY=rivals    # the machine's own torch and tools
    python benchmarks/gpu_rivals.py --out docs/results        # the package installed
        [--models gpt,cnn] [--sides plain,hand,accel] [--steps 1000] [--rounds 1]

A tool that is not installed is left out, and said. The device is waited for after the steps whose time is told, and
nowhere else. All of it takes over an hour; what is measured is written after each run, so that what a shorter limit
leaves is whole as far as it goes. pytorch-autotune, whose trials are for such devices, is among the sides here.
"""

from __future__ import annotations

from _gpu import arguments, is_possible, table, write
from _rivals_rounds import Measured, Options, add_choices, measure
from _rivals_sides import SIDES
from _rivals_tables import columns, missing, rows, verdict_columns, verdicts


def tables(measured: Measured) -> str:
    parts = [table([columns(measured), *rows(measured)])]
    if found := verdicts(measured):
        parts.insert(0, table([verdict_columns(measured), *found]))
    return "\n\n".join([*parts, *(f"Not measured: {line}." for line in missing(measured))])


def main() -> None:
    parser = arguments("Measure AccelPlugin() beside its rivals on a GPU.")
    add_choices(parser, [name for name, side in SIDES.items() if side.by_default or name == "autotune"])
    args = parser.parse_args()
    if not is_possible(args):
        return
    chosen = {"models": args.models, "sides": args.sides, "steps": args.steps, "rounds": args.rounds}
    options = Options(**chosen, device="cuda")
    if args.dry_run:
        options = Options(models=["mlp"], sides=["plain", "thunder"], steps=3, rounds=1)
    print(f"about {options.estimate_s() / 60:.0f} minutes, if nothing else computes", flush=True)
    for measured in measure(options):
        write("rivals", args.out, measured.details(), "Beside its rivals, on", tables(measured))
    print(f"\n{tables(measured)}")


if __name__ == "__main__":
    main()
