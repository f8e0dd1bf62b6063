"""Whether ``AccelPlugin()`` makes a run slower or larger: small models of seven kinds, as they are, on this machine.

    python benchmarks/never_slower.py [--rounds 12] [--models mlp,bert] [--json docs/results]

Both sides of a model train at the same time, in processes of their own, in turns of one to three seconds; while it is
not its turn a process sleeps. The first turns are left out: allocators and caches warm up there, and the plugin
tries its changes until they are settled, or until 40 turns; what that costs is in :mod:`short_runs`. Both have this
package imported, so that the few MiB of that are not in the ratio. A ratio is the median over the rounds of one round's
plain by its accelerated turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from _measure import publish

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from _turns import Job, Run

if TYPE_CHECKING:
    from _small_models import Turn

WARM_UP, MOST = 2, 40
NAMES = ("cnn", "demo_gpt", "small_gpt", "bert", "mlp", "lstm", "unet")
COLUMNS = (
    *("", "turns before", "step, ms", "speed", "least to most", "peak, MiB", "peak memory", "held after a step, MiB"),
    *("held memory", "page faults a step"),
)


def turns_of(name: str, rounds: int, folder: Path) -> tuple[int, list[tuple[Turn, Turn]]]:
    """How many rounds went by until the plugin had settled, and (plain, accelerated) of every one that counts."""
    jobs = [
        Job(name=name, mode=mode, accelerator="cpu", log_dir=folder, worker="_small_models")
        for mode in ("plain", "accelerated")
    ]
    with ExitStack() as stack:
        plain, fast = (stack.enter_context(closing(Run(job))) for job in jobs)
        plain.wait_for_gate()
        fast.wait_for_gate()

        def turn(number: int) -> tuple[Turn, Turn]:
            order = (plain, fast) if number % 2 == 0 else (fast, plain)
            taken = {side: side.take_turn() for side in order}
            return taken[plain], taken[fast]

        before, is_settled = 0, False
        while before < WARM_UP or not (is_settled or before == MOST):
            is_settled = turn(before)[1].is_settled
            before += 1
        return before, [turn(before + number) for number in range(rounds)]


def row(title: str, before: int, turns: list[tuple[Turn, Turn]]) -> list[str]:
    def medians(field: str) -> tuple[float, float]:
        plain, fast = (statistics.median(getattr(turn, field) for turn in side) for side in zip(*turns, strict=True))
        return plain, fast

    speeds = [plain.step_ms / fast.step_ms for plain, fast in turns]
    step_ms, peak, held, faults = map(medians, ("step_ms", "peak_mib", "resident_mib", "faults"))
    return [
        title,
        str(before),
        "{:.1f} → {:.1f}".format(*step_ms),
        f"{statistics.median(speeds):.2f}x",
        f"{min(speeds):.2f} to {max(speeds):.2f}",
        *_ratio(peak),
        *_ratio(held),
        "{:.0f} → {:.0f}".format(*faults),
    ]


def _ratio(mib: tuple[float, float]) -> tuple[str, str]:
    plain, fast = mib
    return f"{plain:.0f} → {fast:.0f}", f"{fast / plain:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", type=lambda text: text.split(","), default=NAMES, metavar=",".join(NAMES))
    options, _ = parser.parse_known_args()
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, *turns_of(name, options.rounds, Path(folder))))
        print("  ".join(rows[-1]), flush=True)
    from _small_models import MODELS  # torch, which the runs had better not wait for

    titled = [[MODELS[cells[0]].title, *cells[1:]] for cells in rows]
    publish(
        "never_slower",
        "python benchmarks/never_slower.py",
        COLUMNS,
        titled,
        {"rounds": options.rounds},
        by_machine=True,
    )


if __name__ == "__main__":
    main()
