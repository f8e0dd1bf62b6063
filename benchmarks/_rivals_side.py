"""One run of :mod:`rivals`, in a process of its own.

python _rivals_side.py REQUEST.json ANSWER.json
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from _held_clocks import hold_clocks
from _rivals_sides import SIDES


def main(request: Path, answer: Path) -> None:
    hold_clocks()
    asked = json.loads(request.read_text(encoding="utf-8"))
    answer.write_text(json.dumps(trained(**asked, folder=request.parent)), encoding="utf-8")


def trained(
    side: str,
    case: str,
    steps: int,
    marks: list[int],
    device: str,
    has_bf16: bool,
    limit_s: float,
    data: str,
    folder: Path,
    turn: int,
) -> dict[str, Any]:
    """What a run has measured, or why there is none."""
    warnings.simplefilter("ignore")
    chosen, began = SIDES[side], time.perf_counter()
    try:
        for package in (*chosen.imports, "torch._dynamo"):  # the last without which no optimizer of torch's steps
            importlib.import_module(package)
    except Exception as error:  # not only of a package that is not there: some break on a newer torch
        return {"absent": "; ".join(filter(None, [str(error), chosen.why]))}
    import torch
    from _rivals_cases import CASES
    from _rivals_training import Clock, Training

    module, _, function = chosen.function.partition(".")
    run = getattr(importlib.import_module(module), function)
    imports_s = time.perf_counter() - began
    weights, batches = torch.load(data)
    net = CASES[case].net(**CASES[case].sizes[device].net)
    net.load_state_dict(weights)
    torch.manual_seed(0)
    clock = Clock(device, marks, limit_s, turn)
    training = Training(
        net=net,
        loss=CASES[case].loss,
        batches=batches,
        steps=steps,
        device=device,
        has_bf16=has_bf16,
        folder=folder,
        clock=clock,
    )
    clock.start()
    try:
        run(training, **chosen.options)
    except Exception:
        if not clock.is_over:  # which tools may tell in words of their own
            raise
    losses = clock.losses()
    return {
        "at_s": clock.at_s,
        "losses": losses,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else peak_mib(),
        "imports_s": imports_s,
        "torch": torch.__version__,
        **training.notes,
    }


def peak_mib() -> float:
    """Of this process's memory. The system's own figure begins with that of the process that has started this one."""
    status = Path("/proc/self/status")
    if status.exists():
        (peak,) = (line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
