"""Trains the models of the zoo on one, two and four CPU processes; each rank writes what it got to ``<row>.<rank>.pt``.

Run by a test in a process of its own: python ranks.py FOLDER quick|slow. Rows that take as many processes run one after
another in the same forks of that process, a fork a rank: starting them is most of what a row would cost.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel import AccelDDPStrategy, AccelFSDPStrategy, AccelPlugin
from lightning_accel.settings import Plan
from support.strategies.forks import Ranks, as_torchrun_does
from support.strategies.zoo import KINDS, VARIANTS, make

_PATIENCE_S = 60  # for a row that hangs, in a group of any size
MODELS = ("transformer", "cnn", "gan")
VARIATIONS = tuple(kind for kind in KINDS if kind not in MODELS)
SAVED = ("transformer", "gan", "groups")  # what is stopped and resumed
_OVER_AN_EPOCH = (*SAVED, "cnn", "unfrozen", "scheduler")  # what a second epoch could be wrong for


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run: a model, under a strategy, on a number of processes.

    Attributes:
        kind: Which model of the zoo.
        variant: How it is trained.
        strategy: ``"plain"`` is Lightning's own choice, without plugin.
        world_size: Number of processes.
        does: ``"stop"`` trains one epoch of two and leaves a checkpoint, ``"resume"`` goes on from that of ``source``.
        sharded: Whether checkpoints are folders, with a file a rank.
    """

    kind: str
    variant: str = "plain"
    strategy: str = "plain"
    world_size: int = 1
    does: Literal["fit", "fit and evaluate", "fit twice", "stop", "resume"] = "fit"
    sharded: bool = False
    source: Row | None = None

    def __str__(self) -> str:
        shards = " in shards" if self.sharded else ""
        origin = f" from {self.source}" if self.source else ""
        return f"{self.kind}, {self.variant}, {self.strategy} on {self.world_size}, {self.does}{shards}{origin}"


def reference(row: Row) -> Row:
    """The plain run in one process that ``row`` has to equal: for a resumed run, one that was never stopped."""
    return Row(kind=row.kind, variant=row.variant, does="fit" if row.does in ("stop", "resume") else row.does)


# -- the table ---------------------------------------------------------------------------------------------------------

PLACES = (("accel", 1), ("accel_ddp", 2), ("accel_fsdp", 2), ("accel_ddp", 4), ("accel_fsdp", 4))


def fits() -> list[Row]:
    """Every model, trained in every way, everywhere."""
    return [
        Row(kind=kind, variant=variant, strategy=strategy, world_size=world_size)
        for kind in MODELS
        for variant in VARIANTS
        for strategy, world_size in PLACES
    ]


def variations() -> list[Row]:
    """Models that are written in other ways."""
    return [
        Row(kind=kind, strategy=strategy, world_size=world_size)
        for kind in VARIATIONS
        for strategy, world_size in PLACES[:3]
    ]


def evaluations() -> list[Row]:
    return [
        Row(kind=kind, strategy=strategy, world_size=world_size, does=does)
        for kind in ("transformer", "cnn")
        for strategy, world_size in PLACES[:3]
        for does in ("fit and evaluate", "fit twice")
    ]


def resumptions() -> list[Row]:
    """Runs that go on from a checkpoint of another strategy, or of another number of processes."""
    fsdp, plain = {"strategy": "accel_fsdp"}, {"strategy": "plain"}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({**fsdp, "world_size": 2}, plain),
        (plain, {**fsdp, "world_size": 2}),
        ({**fsdp, "world_size": 4}, {**fsdp, "world_size": 2}),
        ({**fsdp, "world_size": 4, "sharded": True}, {**fsdp, "world_size": 2, "sharded": True}),
        ({"strategy": "accel_ddp", "world_size": 2}, plain),
        (plain, {"strategy": "accel_ddp", "world_size": 2}),
    ]
    return [
        Row(kind=kind, does="resume", source=Row(kind=kind, does="stop", **saved), **resumed)
        for kind in SAVED
        for saved, resumed in ways
    ]


EVALUATED = (("cnn", "accel_ddp"), ("transformer", "accel_fsdp"))  # each strategy with one model
RESUMED = (("transformer", "plain"), ("transformer", "accel_fsdp"), ("groups", "accel_fsdp"))  # with what goes on


def is_slow(row: Row) -> bool:
    """Left to `make test-slow`: what is shown otherwise, by all variants together, by the transformer, by two ranks.

    Accumulation is not left to all variants together: clipping, as one of them, takes the scale of gradients away.
    Plain steps are those of runs that fit twice, four ranks those of the run that leaves shards.
    """
    if row.does == "fit" and row.kind in MODELS:
        if row.variant == "all":
            return row.world_size == 4
        return (row.kind, row.world_size) != ("transformer", 2) or row.variant != "accumulation"
    if row.does == "fit":  # under DDP those that it has to be told of
        is_shown = row.strategy == "accel_fsdp" or (row.strategy == "accel_ddp" and KINDS[row.kind].ddp)
        return not is_shown or row.kind in ("scheduler", "never called", "groups")  # groups are resumed
    if row.source is not None:
        if row.source.world_size == 4:
            return (row.kind, row.sharded) != ("gan", True)  # shards of several optimizers
        return "accel_ddp" in (row.strategy, row.source.strategy) or (row.kind, row.strategy) not in RESUMED
    if row.does == "fit twice":
        return row.strategy == "accel" or row.kind == "cnn"
    return (row.kind, row.strategy) not in EVALUATED


def with_what_they_need(rows: Iterable[Row]) -> list[Row]:
    """``rows``, after the references they are compared with and the checkpoints they start from."""
    needed: dict[Row, None] = {}
    for row in rows:
        needed[reference(row)] = None
        if row.source is not None:
            needed[row.source] = None
        needed[row] = None
    return list(needed)


# -- a run -------------------------------------------------------------------------------------------------------------


class LowScale(Callback):
    """Has a gradient scaler begin where nothing overflows: how soon it does is the processor's, and skips a step."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0})


class Witness(Callback):
    """Sees, during a fit, what the strategy made of the model."""

    def __init__(self) -> None:
        self.wrapper = ""
        self.share_held = 1.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.wrapper = type(trainer.strategy.model).__name__
        parameters = list(pl_module.parameters())
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
        self.share_held = held / sum(p.numel() for p in parameters)


def run(row: Row, folder: Path) -> dict[str, Any]:
    """Does what ``row`` says; losses of every step, weights, metrics, predictions of this rank."""
    module, data, options = make(row.kind, row.variant)
    witness = Witness()
    options |= {"max_epochs": epochs(row), "callbacks": [witness, LowScale(), *_savers(row, folder)]}
    if row.does != "fit and evaluate":
        options |= {"num_sanity_val_steps": 0, "limit_val_batches": 1}  # only that there is a validation
    trainer = trainer_for(row, **options)
    said: dict[str, Any] = {}
    if row.does == "fit and evaluate":
        said["validated"] = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data, ckpt_path=row.source and checkpoint_of(row.source, folder), weights_only=False)
    if row.does == "fit twice":
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data)
    if row.does == "fit and evaluate":
        said["tested"] = trainer.test(module, data, verbose=False)
        said["predicted"] = torch.cat(trainer.predict(module, data))
    plugin = trainer.precision_plugin
    report = plugin.report.to_dict()["techniques"] if isinstance(plugin, AccelPlugin) else {}
    said["checkpointed"] = list(report.get("gradient_checkpointing", {}).get("applied", ()))
    said |= {"wrapper": witness.wrapper, "share_held": witness.share_held}
    return said | {"losses": module.losses, "weights": weights(module)}


def epochs(row: Row) -> int:
    if row.does in ("stop", "fit twice"):
        return 1
    return 2 if row.does == "resume" or (row.variant == "plain" and row.kind in _OVER_AN_EPOCH) else 1


def trainer_for(row: Row, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    if row.strategy != "plain":
        # Techniques that are kept or not by the clock would compute other last bits from run to run.
        settings = {"precision": "32-true", "flash_attention": "off", "memory_format": "off", "report": False}
        options |= {
            "strategy": strategy(row),
            "plugins": [AccelPlugin.from_plan(Plan().replace(**{**settings, **VARIANTS[row.variant][1]}))],
        }
    saves = any(isinstance(callback, ModelCheckpoint) for callback in options["callbacks"])
    return Trainer(accelerator="cpu", devices=row.world_size, enable_checkpointing=saves, **quiet, **options)


def strategy(row: Row) -> Any:
    if row.sharded:
        return AccelFSDPStrategy(save_distributed_checkpoint=True)
    if row.strategy == "accel_ddp" and KINDS[row.kind].ddp:
        return AccelDDPStrategy(**KINDS[row.kind].ddp)
    return row.strategy


def checkpoint_of(row: Row, folder: Path) -> Path:
    return folder / f"{row}.ckpt"


def _savers(row: Row, folder: Path) -> list[Callback]:
    if row.does != "stop":
        return []
    name = ModelCheckpoint(folder, checkpoint_of(row, folder).stem, save_top_k=-1)
    return [name]


def weights(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of ``module`` would hold, put together from all ranks."""
    return {name: whole(tensor).detach().clone() for name, tensor in module.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- processes ---------------------------------------------------------------------------------------------------------


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """``rows`` by how many processes they take, those that start from another's checkpoint after all others."""
    found: dict[tuple[bool, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.source is not None, row.world_size), []).append(row)
    ordered = [found[key] for key in sorted(found)]
    # Single processes run two by two, on the two processors that there are.
    parted = ([group[::2], group[1::2]] if group[0].world_size == 1 else [group] for group in ordered)
    return [part for parts in parted for part in parts if part]


def run_all(rows: Iterable[Row], folder: Path) -> None:
    """Runs ``rows``, those of a group one after another in the same processes."""
    beside: list[Ranks] = []
    for group in groups(rows):
        world_size = group[0].world_size
        if world_size > 1 or len(beside) == 2:
            finish(beside)
        environments = as_torchrun_does(world_size) if world_size > 1 else [{}]
        work = functools.partial(run_group, group, folder)
        beside.append(Ranks(work, environments, patience_s=_PATIENCE_S + 10 * len(group)))
        if world_size > 1:
            finish(beside)
    finish(beside)


def finish(beside: list[Ranks]) -> None:
    for ranks in beside:
        ranks.wait()
    beside.clear()


def run_group(group: list[Row], folder: Path, rank: int) -> None:
    """Runs rows on a rank; what each returns, or ``error``, goes to ``<row>.<rank>.pt``, what it prints to ``.log``."""
    os.chdir(folder)
    for row in group:
        with (folder / f"{row}.{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            said = run(row, folder)
        except BaseException as error:
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}"}
        torch.save(said, folder / f"{row}.{rank}.pt")


def table(which: str) -> list[Row]:
    """The rows of the default suite (``"quick"``), or those that are left to `make test-slow` (``"slow"``)."""
    rows = fits() + variations() + evaluations() + resumptions()
    chosen = [row for row in rows if is_slow(row) == (which == "slow")]
    if which == "quick":  # what makes a difference to one process is shown of every variant, and whole checkpoints are
        chosen += [Row(kind="transformer", variant=variant) for variant in VARIANTS]
        chosen += [Row(kind=kind) for kind in MODELS]
        chosen += [Row(kind=kind, does="stop") for kind in SAVED]
        chosen += [Row(kind=kind, strategy="accel_fsdp", world_size=2, does="stop") for kind in SAVED]
    return chosen


if __name__ == "__main__":
    run_all(with_what_they_need(table(sys.argv[2])), Path(sys.argv[1]))
