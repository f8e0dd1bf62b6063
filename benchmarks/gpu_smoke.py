"""Whether everything works on this GPU: the demo's two models with each technique by itself, and with all of them.

    make gpu-smoke PYTHON=python3                             # three minutes
    python benchmarks/gpu_smoke.py --out docs/results         # the package installed

Each run starts from the same weights, sees the same eight batches, and asks for one technique by name; its losses are
compared with those of the plain run on the processor. Then a longer run of each model, plain and with ``AccelPlugin()``
as users have it. Ends with status 1 where a run raised, or a loss is further off than its number format
lets expect.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from _gpu import arguments, is_possible, table, write
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from lightning_accel import AccelPlugin
from lightning_accel.core.options import choices_of
from lightning_accel.settings import Plan
from lightning_accel.techniques.registry import declarations

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

STEPS, LONG = 8, 1_500
JUDGED = 5  # of these steps: later ones multiply what rounding has put off, by ten in a step
TOLERANCES = {"precision": 0.05, "changes training": 0.1}
TOLERANCE = 2e-3
"""Of losses, relative, in the number format of the plain run: eight steps on another device, in another order."""


@dataclass
class Outcome:
    """What one run came to.

    Attributes:
        model: Which of the two.
        name: The settings.
        losses: Of each step.
        step_ms: Median of the later half of its steps, with what Lightning does between them.
        whole_s: From the first step's end to the last's.
        peak_mib: The most that was allocated on the GPU.
        sites: Where something was changed.
        off_by: The largest deviation of one of the first losses from the plain run on the processor, relative.
        status: What the report says of the technique.
        failure: What it raised, or that it is too far off; empty: nothing.
        remarks: Warnings, reasons of refusals, and where it raised.
    """

    model: str
    name: str
    losses: list[float] = field(default_factory=list)
    step_ms: float = math.nan
    whole_s: float = math.nan
    peak_mib: float = 0.0
    sites: int = 0
    off_by: float = math.nan
    status: str = ""
    failure: str = ""
    remarks: list[str] = field(default_factory=list)


class Watch(Callback):
    """Notes losses, and when steps end."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.ended: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach())
        self.ended.append(time.perf_counter())


def main() -> None:
    parser = arguments("Train with each technique once, and compare losses with the processor's.")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--long", type=int, default=LONG, help="steps of the longer runs; 0: leaves them out")
    args = parser.parse_args()
    if not is_possible(args):
        return
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.backends.cudnn.allow_tf32 = False  # torch's own default, which is another number format than the processor's
    accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    outcomes: list[Outcome] = []
    try:
        for model in MODELS:
            outcomes += trained(model, args.only, accelerator, args.dry_run, STEPS if args.dry_run else args.long)
    finally:
        rows_of_it = [["model", "settings", "sites", "off by", "step, ms", "whole, s", "peak, MiB", "came of it"]]
        rows_of_it += [line(outcome) for outcome in outcomes]
        text = table(rows_of_it)
        print(f"\n{text}")
        write("smoke", args.out, {"rows": [asdict(outcome) for outcome in outcomes]}, "", text)
    if any(outcome.failure for outcome in outcomes):
        sys.exit(1)


def trained(model: str, only: str, accelerator: str, is_dry: bool, long: int) -> Iterator[Outcome]:
    """The rows of one model whose names contain ``only``."""
    expected = run(model, "the processor", "cpu", None)
    for name, settings, tolerance in rows():
        if only in name and not (is_dry and "16-mixed" in name):  # processors take minutes for it
            outcome = run(model, name, accelerator, settings)
            judge(outcome, expected, tolerance)
            yield outcome
    for name, settings in ((f"plain, {long:,} steps", None), (f"AccelPlugin(), {long:,} steps", {})):
        if long and only in name:
            yield run(model, name, accelerator, settings, long)


def digits() -> tuple[Any, Any]:
    from digits import Digits, DigitsNet

    return DigitsNet(width=16), Digits(batch_size=32, size=32)


def gpt() -> tuple[Any, Any]:
    from bytes_gpt import BytesGPT, StdlibText

    return BytesGPT(dim=128, depth=3, num_heads=4, seq_len=256, lr=1e-2), StdlibText(batch_size=8, seq_len=256)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {"digits": digits, "bytes_gpt": gpt}


_NOT_SHOWN = ("auto", "rowwise_with_gw_hp", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_NUMBERS = {"padding": (64,), "memory_budget": ("12GiB",), "threads": (1,), "sparse_activations": ("auto",)}


def rows() -> Iterator[tuple[str, dict[str, Any] | None, float]]:
    """Names, settings and tolerances: plain, each technique with what it declares worth showing, several together."""
    yield "plain", None, TOLERANCE
    off = {name: declaration.off for name, declaration in declarations().items()}
    for name, declaration in declarations().items():
        choices = [one for one in choices_of(declaration.switch_type) if one not in _NOT_SHOWN]
        for value in dict.fromkeys((declaration.switch(declaration.default), *choices, *_NUMBERS.get(name, ()))):
            if value != declaration.off:
                yield (
                    f"{name}={value}",
                    off | {name: value, "trust": "checked"},
                    TOLERANCES.get(declaration.exactness, TOLERANCE),
                )
    saving = {"gradient_checkpointing": "selective", "activation_offloading": {"to": "host", "min_bytes": 1024}}
    yield "saving memory", off | saving | {"sparse_activations": "auto", "trust": "checked"}, TOLERANCE
    yield "saving memory, bf16", off | saving | {"precision": "bf16-mixed", "trust": "checked"}, TOLERANCES["precision"]
    yield "compiled, bf16", {"precision": "bf16-mixed", "compile": "on", "trust": "checked"}, TOLERANCES["precision"]
    yield "captured, bf16", {"precision": "bf16-mixed", "graphs": "on", "trust": "checked"}, TOLERANCES["precision"]
    yield "16-mixed", {"precision": "16-mixed", "trust": "checked"}, TOLERANCES["precision"]


def run(model: str, name: str, accelerator: str, settings: dict[str, Any] | None, steps: int = STEPS) -> Outcome:
    """One training, whatever it comes to."""
    outcome, watch, start = Outcome(model, name), Watch(), time.perf_counter()
    plugin = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seed_everything(0, verbose=False)
            module, data = MODELS[model]()
            plugin = None if settings is None else AccelPlugin.from_plan(Plan().replace(**settings))
            if accelerator == "gpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            trainer(plugin, accelerator, steps, watch).fit(module, datamodule=data)
        except Exception as error:
            outcome.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            places = traceback.extract_tb(error.__traceback__)
            outcome.remarks += [f"{Path(place.filename).name}:{place.lineno}: {place.line}" for place in places]
    outcome.losses = [float(loss) for loss in watch.losses[:STEPS]]
    intervals = [later - earlier for earlier, later in zip(watch.ended, watch.ended[1:], strict=False)]
    if intervals:
        outcome.step_ms = statistics.median(intervals[len(intervals) // 2 :]) * 1e3
        outcome.whole_s = sum(intervals)
    outcome.peak_mib = torch.cuda.max_memory_allocated() / 2**20 if accelerator == "gpu" else 0.0
    outcome.remarks += [str(one.message) for one in caught if "accel" in type(one.message).__name__.lower()]
    if plugin is not None:
        report = plugin.report
        outcome.sites = sum(len(report.applied(name)) for name in declarations())
        if (technique := name.partition("=")[0]) in declarations():
            outcome.status = report.of(technique).status
        outcome.remarks.append(report.to_text())
    print(f"{model}, {name}: {time.perf_counter() - start:.1f} s {outcome.failure}", flush=True)
    return outcome


def trainer(plugin: AccelPlugin | None, accelerator: str, steps: int, watch: Watch) -> Trainer:
    return Trainer(
        plugins=[] if plugin is None else [plugin],
        accelerator=accelerator,
        devices=1,
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[watch],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def judge(outcome: Outcome, expected: Outcome, tolerance: float) -> None:
    """Notes how far its losses are off, and whether that is too far."""
    if outcome.failure:
        return
    pairs = zip(outcome.losses[:JUDGED], expected.losses[:JUDGED], strict=True)
    outcome.off_by = max(abs(found - wanted) / wanted for found, wanted in pairs)
    if not outcome.off_by <= tolerance:
        outcome.failure = f"losses are off by {outcome.off_by:.1e}, and {tolerance:.0e} is allowed"


def line(outcome: Outcome) -> list[str]:
    numbers = [f"{outcome.off_by:.1e}", f"{outcome.step_ms:.2f}", f"{outcome.whole_s:.1f}"]
    numbers.append(f"{outcome.peak_mib:,.0f}")
    return [
        outcome.model,
        outcome.name,
        str(outcome.sites),
        *numbers,
        outcome.failure or outcome.status or "as it should",
    ]


if __name__ == "__main__":
    main()
