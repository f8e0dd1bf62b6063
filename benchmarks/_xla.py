"""What AccelXLAPlugin saves in compiling and in recording: texts of many lengths on XLA's CPU device.

.venv-xla/bin/python benchmarks/_xla.py --json docs/results

For the environment that `make test-xla` makes. Every row is a process of its own, as a process keeps its programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROWS = {"plain": "None", "`AccelXLAPlugin()`": "{}", "`AccelXLAPlugin(padding=16)`": "{'padding': 16}"}
LENGTHS = list(range(17, 29))
STEPS = 2 * len(LENGTHS)
COUNTED = ("programs", "compiling_s", "seconds", "recorded")
VOCABULARY, BATCH, WIDTH = 50, 4, 32


def measure(settings: dict[str, Any] | None) -> dict[str, Any]:
    """One epoch of a transformer layer over batches of every length, twice."""
    import torch
    import torch.nn.functional as F
    import torch_xla.debug.metrics as metrics
    from lightning.pytorch import LightningModule, seed_everything
    from torch import nn
    from torch.utils.data import DataLoader

    from lightning_accel import AccelXLAPlugin
    from lightning_accel.settings import Plan
    from support.xla_runs import counted, trainer

    class Text(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY)
            self.created: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.layer(self.embedding(batch["input_ids"]), src_key_padding_mask=batch["attention_mask"] == 0)
            logits = self.head(hidden).flatten(0, 1)
            return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.last = outputs["loss"].detach()
            self.created.append(counted("CreateXlaTensor"))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, VOCABULARY, (BATCH, length), generator=draw) for length in 2 * LENGTHS]
    batches = [{"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one.clone()} for one in ids]
    seed_everything(0)
    module = Text()
    running = trainer(*([] if settings is None else [AccelXLAPlugin.from_plan(Plan().replace(**settings))]))
    began = time.perf_counter()
    running.fit(module, DataLoader(batches, batch_size=None))
    last = float(module.last)
    return {
        "seconds": time.perf_counter() - began,
        "programs": counted("UncachedCompile"),
        "compiling_s": metrics.metric_data("CompileTime")[1] / 1e9,
        "recorded": module.created[-1] - module.created[-2],
        "loss": last,
    }


def main() -> None:
    from _measure import publish

    found = {}
    for name, settings in ROWS.items():
        command = [sys.executable, __file__, "--settings", settings]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        found[name] = json.loads(lines[-1])
    publish(
        "xla",
        ".venv-xla/bin/python benchmarks/_xla.py",
        ["", "programs compiled", "compiling, s", "in all, s", "tensors recorded in a step", "last loss"],
        [[name, *(f"{one[column]:.0f}" for column in COUNTED), f"{one['loss']:.6f}"] for name, one in found.items()],
        {"steps": STEPS, "lengths": LENGTHS},
    )


if __name__ == "__main__":
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    if "--settings" in sys.argv:
        import ast

        print(json.dumps(measure(ast.literal_eval(sys.argv[-1]))))
    else:
        main()
