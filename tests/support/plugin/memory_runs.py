"""Runs with less memory than they ask for: the system refuses it (``ulimit -d``), and torch's own allocator raises.

What each came to goes to ``<run>.json``. Run by a test in a process of its own: python memory_runs.py FOLDER
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder, Callback

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.strategies.forks import in_ranks

WIDTH, HIDDEN, BLOCKS = 64, 256, 12
SMALL, LARGE = 256, 8192  # samples; a block keeps 2 KiB of activations for each, and 256 bytes if it is checkpointed
SIZES = [SMALL] * 4 + [LARGE] + [SMALL] * 20 + [LARGE]
WITH_A_LARGER_ONE = [SMALL] * 4 + [LARGE * 2 + 1] + [SMALL] * 20
_MIB = 1 << 20
_M_MMAP_THRESHOLD = -3  # mallopt(3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Deep(LightningModule):
    """Activations are nearly all that it needs memory for. Its dropout draws numbers in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.register_buffer("seen", torch.zeros(()))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        self.log("samples", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        loss = self.after(self.blocks(batch)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def after(self, x: Tensor) -> Tensor:
        return x

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


class _AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        scratch = torch.zeros(150 * _MIB // LARGE * len(gradient), dtype=torch.uint8)
        return gradient + scratch[0]


class AsksInBackward(Deep):
    """The forward pass fits, and the backward pass wants more beside all that was kept for it."""

    def after(self, x: Tensor) -> Tensor:
        return _AsksInBackward.apply(x)


class Counts(Block):
    """Would count twice if it were recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class DeepThatCounts(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Counts() for _ in range(BLOCKS)))


class ByHand(Deep):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).exp().tanh().sigmoid().exp()


class Flat(LightningModule):
    """Has no blocks, and so nothing to checkpoint but itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"wide": Wide()})
        self.head = nn.Linear(8 * HIDDEN, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.inner["wide"](batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


class Calm(Flat):
    """Learns slowly enough to learn."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


class Evaluated(Flat):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class KeepsStates(torch.optim.SGD):
    """An optimizer with very large states."""

    def step(self, closure: Any = None) -> Any:
        outputs = super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["huge"] = torch.zeros(1024 * _MIB, dtype=torch.uint8)
        return outputs


class FlatWithStates(Flat):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return KeepsStates(self.parameters(), 0.05)


class Searched(Deep):
    """Its batch size is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = SMALL

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(1 << 14, WIDTH), batch_size=self.batch_size)


class Batches(IterableDataset[Tensor]):
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Tensor]:
        for index, size in enumerate(self.sizes):
            yield torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(index))


class Limits(Callback):
    """From the start of a run on, the process may take so much more than it has."""

    def __init__(self, more_mib: int) -> None:
        self.more_mib = more_mib

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert data is not None
        limit = int(data[1]) * 1024 + self.more_mib * _MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def fit(
    kind: type[LightningModule], more_mib: int | None, sizes: list[int] = SIZES, **options: Any
) -> tuple[LightningModule, Trainer, AccelPlugin | None, dict[str, Any]]:
    """Trains one; with ``more_mib`` None a plain Trainer with all the memory there is."""
    # Which arm has its turn when memory runs out, and goes first of all, would hang on how busy the machine is.
    # Nor is anything to need less memory before it is short, as bfloat16 does where a processor has it.
    settings = {"report": False, "trust": "checked", "precision": "32-true", **options.pop("settings", {})}
    plugin = AccelPlugin.from_plan(Plan().replace(**settings)) if more_mib is not None else None
    seed_everything(0, verbose=False)
    model = kind()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=options.pop("max_epochs", 1),
        plugins=[plugin] if plugin else [],
        callbacks=[*([Limits(more_mib)] if more_mib else []), *options.pop("callbacks", [])],
        **{
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **{k: v for k, v in options.items() if k not in ("ckpt_path", "loader")},
        },
    )
    said: dict[str, Any] = {"error": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loader = DataLoader(Batches(sizes), batch_size=None) if options.get("loader", True) else None
            trainer.fit(model, loader, ckpt_path=options.get("ckpt_path"))
        except Exception as error:
            said |= {"error": str(error), "kinds": [one.__name__ for one in type(error).__mro__]}
            said["cause"] = type(error.__cause__).__name__
    said["warned"] = [str(one.message) for one in caught if "out of memory" in str(one.message)]
    said["losses"] = getattr(model, "losses", [])
    said["weights"] = float(sum(p.detach().double().abs().sum() for p in model.parameters()))
    said["seen"] = float(getattr(model, "seen", 0.0))
    said["logged"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if plugin is not None:
        said["applied"] = {name: len(one.changes) for name, one in plugin.report.techniques.items()}
        said["notes"] = plugin.report.notes
        said["state"] = plugin.state_dict()
        said["refused"] = {name: one.refusals for name, one in plugin.report.techniques.items() if one.refusals}
        said["status"] = {name: one.status for name, one in plugin.report.techniques.items()}
        said["left"] = ["forward" in vars(module) for module in model.modules()].count(True)
    return model, trainer, plugin, said


def resumed(folder: Path) -> dict[str, Any]:
    trainer = fit(Deep, 200)[1]
    trainer.save_checkpoint(folder / "answered.ckpt")
    return fit(Deep, 200, max_epochs=2, ckpt_path=folder / "answered.ckpt")[-1]


def evaluated(folder: Path) -> dict[str, Any]:
    plugin = AccelPlugin(report=False)
    trainer = Trainer(accelerator="cpu", plugins=[plugin], callbacks=[Limits(100)], logger=False)
    try:
        trainer.validate(Evaluated(), DataLoader(Batches([LARGE * 2]), batch_size=None), verbose=False)
    except RuntimeError as error:
        return {"error": str(error), "notes": plugin.report.notes}
    return {"error": None}


def searched(folder: Path) -> dict[str, Any]:
    finder = BatchSizeFinder(steps_per_trial=1, init_val=SMALL, max_trials=7)
    model, _, _, said = fit(Searched, 100, callbacks=[finder], loader=False, limit_train_batches=3)
    return {**said, "batch_size": model.batch_size}


def ranks(folder: Path) -> dict[str, Any]:
    """Of two ranks, the second has no memory."""

    def be(rank: int) -> None:
        options = {"strategy": "ddp", "devices": 2, "settings": {"report": True}}
        said = fit(Deep, 150 if rank else 4000, **options, default_root_dir=folder / f"rank {rank}")[-1]
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (folder / f"rank {rank}.json").write_text(json.dumps(said))

    in_ranks(be, 2)
    return {}


def only(kind: type[LightningModule], *args: Any, **options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: fit(kind, *args, **options)[-1]


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": only(Deep, None),
    "in its forward pass": only(Deep, 200),
    "plain, with a greedy backward pass": only(AsksInBackward, None),
    "in its backward pass": only(AsksInBackward, 360),
    "plain, first": only(Deep, None, [LARGE] * 2),
    "in its first step": only(Deep, 200, [LARGE] * 2),
    "by hand": only(ByHand, 200),
    "resumed": resumed,
    "blocks that count": only(DeepThatCounts, 200),
    "plain, accumulating": only(AsksInBackward, None, accumulate_grad_batches=2),
    "first of two that are added up": only(AsksInBackward, 360, accumulate_grad_batches=2),
    "second of three that are added up": only(AsksInBackward, 360, accumulate_grad_batches=3),
    "nothing is enough": only(Deep, 20),
    "off": only(Deep, 200, settings={"memory": {"on_oom": "off"}}),
    "no blocks": only(Flat, 200, [SMALL, LARGE * 2]),
    "no blocks, with more memory": only(Calm, None, WITH_A_LARGER_ONE),
    "split": only(Calm, 200, WITH_A_LARGER_ONE, settings={"memory": {"on_oom": "split"}}),
    "optimizer": only(FlatWithStates, 200, [SMALL] * 2),
    "evaluated": evaluated,
    "searched": searched,
    "ranks": ranks,
}


def main() -> None:
    folder = Path(sys.argv[1])
    for run, do in RUNS.items():
        if len(sys.argv) > 2 and run not in sys.argv[2:]:
            continue
        if (pid := os.fork()) == 0:
            try:
                # Or pieces of a heap stay between what others hold, and count as taken.
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
                torch.set_num_threads(1)
                logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
                said = do(folder)
                resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                (folder / f"{run}.json").write_text(json.dumps(said))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, run


if __name__ == "__main__":
    main()
