"""``AccelPlugin()`` beside its rivals: six models, trained by Lightning, by hand and by other people's tools.

    make rivals                                                    # in .venv-rivals, which has the tools
    python benchmarks/rivals.py [--steps 1000] [--rounds 1] [--models gpt,cnn] [--sides plain,accel]
        [--python composer=PATH] [--limit 300] [--json docs/results] [--name rivals]

Every side of a model starts from the same weights and trains the same batches by AdamW, for as many steps, in a process
of its own that finds nothing in any cache. A step's time is taken when it is over; the clock starts after imports and
before anything else, so that setting up, compiling and trials are paid for. *Settled* is the median of the last quarter
of the steps. Ratios are medians over rounds. Sides that compile are in the first round only.

On a CPU, the processes of a round take turns of 20 steps, in random order: a shared machine's speed changes from minute
to minute. All clocks of a process, the plugin's own among them, stand still while another has the turn. There must be
memory for all sides at once: 10 GB for thirteen.

A tool that is not installed is left out, and said. Composer and Thunder do not go beside this torch: ``--python`` names
an interpreter of their own, which needs neither Lightning nor this package. What is measured is written after each run,
so that a run that is cut off leaves what it has. It prints how long it will take. With ``--json`` a table replaces
that of the same ``--name`` and machine.
"""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout

from _measure import publish
from _rivals_cases import CASES
from _rivals_rounds import USUAL_STEPS, Measured, Options, add_choices, measure
from _rivals_sides import SIDES
from _rivals_tables import columns, missing, rows, verdict_columns, verdicts

LIMIT_S = 300
BY_DEFAULT = [name for name, side in SIDES.items() if side.by_default]


def write(measured: Measured, command: str, name: str) -> None:
    verdict = {"columns": verdict_columns(measured), "rows": verdicts(measured)}
    details = {"verdicts": verdict, "not measured": missing(measured), **measured.details()}
    publish(name, command, columns(measured), rows(measured), details, by_machine=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_choices(parser, BY_DEFAULT)
    parser.add_argument("--python", action="append", default=[], metavar="SIDE=PATH", help="the interpreter of a side")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="after which a run is cut off")
    parser.add_argument("--name", help="of the table; where it is not said, of the number of steps")
    chosen, _ = parser.parse_known_args()
    name = chosen.name or ("rivals" if chosen.steps == USUAL_STEPS else f"rivals-{chosen.steps}-steps")
    options = Options(
        models=chosen.models,
        sides=chosen.sides,
        steps=chosen.steps,
        rounds=chosen.rounds,
        pythons=dict(each.split("=", 1) for each in chosen.python),
        limit_s=chosen.limit,
    )
    command = f"python benchmarks/rivals.py --steps {options.steps} --rounds {options.rounds}"
    command += "" if chosen.models == list(CASES) else f" --models {','.join(chosen.models)}"
    command += "" if chosen.sides == BY_DEFAULT else f" --sides {','.join(chosen.sides)}"
    command += "" if chosen.limit == LIMIT_S else f" --limit {chosen.limit:g}"
    command += f" --name {chosen.name}" if chosen.name else ""
    print(f"about {options.estimate_s() / 60:.0f} minutes, if nothing else computes", flush=True)
    for measured in measure(options):
        with redirect_stdout(io.StringIO()):  # the table so far
            write(measured, command, name)
    write(measured, command, name)
    for cells in (verdict_columns(measured), *verdicts(measured)):
        print("  ".join(cells))
    print(*(f"not measured: {line}" for line in missing(measured)), sep="\n")


if __name__ == "__main__":
    main()
