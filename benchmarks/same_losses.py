"""Whether an accelerated run computes what the plain one does: the largest relative difference of its losses.

    python benchmarks/same_losses.py [--json docs/results]

The demo's two models and data, the same weights and batches, ten steps. To answer: with `32-true` and everything else
on, the plain run's losses to 1e-5; with `bf16-mixed`, those of Lightning's own `bf16-mixed` to the same.

Two networks that compute the same function in another order of summation drift apart as they train, at a pace of their
own that has nothing to do with errors. The last rows show it: the plain float32 run against itself with another number
of threads, and with nothing changed but the memory format of its convolutions, by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from _measure import publish
from lightning.pytorch import LightningModule, Trainer, seed_everything

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from bytes_gpt import BytesGPT, StdlibText
from digits import Digits, DigitsNet

STEPS = 10
EVERYTHING: dict[str, Any] = {"gradient_checkpointing": "full", "compile": "on", "report": True}


def losses(network: type[LightningModule], **options: Any) -> list[float]:
    """The training loss of every step, as the module itself computed it."""
    seed_everything(0, verbose=False)
    channels_last = options.pop("channels_last", False)
    threads = options.pop("threads", torch.get_num_threads())
    seen: list[float] = []

    class Noted(network):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            seen.append(float(loss))
            return loss

    model = Noted()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    data = Digits() if network is DigitsNet else StdlibText()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "limit_val_batches": 0}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        Trainer(max_steps=STEPS, **quiet, **options).fit(model, datamodule=data)
    finally:
        torch.set_num_threads(before)
    return seen


def apart(a: list[float], b: list[float], steps: int = STEPS) -> str:
    return f"{max(abs(x - y) / abs(y) for x, y in zip(a[:steps], b[:steps], strict=True)):.1e}"


def main() -> None:
    rows = []
    for name, network in (("CNN", DigitsNet), ("GPT", BytesGPT)):
        plain = losses(network)
        lightning_bf16 = losses(network, precision="bf16-mixed")

        def add(what: str, found: list[float], reference: list[float], name: str = name) -> None:
            rows.append([name, what, *(apart(found, reference, steps) for steps in (1, 3, STEPS))])

        def accelerated(**plan: Any) -> dict[str, Any]:
            return {"plugins": [AccelPlugin.from_plan(Plan().replace(**plan))]}

        add("32-true, all on / plain", losses(network, **accelerated(precision="32-true", **EVERYTHING)), plain)
        preserved = accelerated(precision="32-true", memory_format="off", gradient_checkpointing="full")
        add("32-true, layouts kept / plain", losses(network, **preserved), plain)
        add(
            "bf16-mixed, layouts kept / Lightning's bf16-mixed",
            losses(network, **accelerated(precision="bf16-mixed", memory_format="off")),
            lightning_bf16,
        )
        add("plain, one thread / plain", losses(network, threads=1), plain)
        if network is DigitsNet:
            add("plain, channels_last by hand / plain", losses(network, channels_last=True), plain)
    publish(
        "same_losses",
        "python benchmarks/same_losses.py",
        ["model", "losses of / against", "step 1", "3 steps", f"{STEPS} steps"],
        rows,
    )


if __name__ == "__main__":
    main()
