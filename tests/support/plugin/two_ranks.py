"""Training runs on two CPU processes, one after another; each rank writes what it got into ``<run>.<rank>.json``.

Run by a test in a process of its own: python two_ranks.py FOLDER [RUN ...]
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader, DistributedSampler

from lightning_accel import AccelPlugin
from lightning_accel.data import Normalize
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, Transformer, images, tokens
from support.models import TinyTransformer
from support.strategies.forks import in_ranks


class Views(Supervised):
    """Takes an activation apart with ``view``, which channels_last does not allow."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0 * self.net[0](batch[0]).view(batch[0].size(0), -1).mean()


class Foreign(Supervised):
    """Trains with an optimizer that is not torch's own: such ones may read gradients by their layout."""

    def configure_optimizers(self) -> Any:
        return type("Mine", (torch.optim.SGD,), {"step": _plain_step})(self.parameters(), lr=0.05)


@torch.no_grad()
def _plain_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        loss = closure()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.sub_(parameter.grad, alpha=0.05)
    return loss


class Fickle(nn.Conv2d):
    """Computes other numbers in channels_last, on one rank only."""

    def __init__(self, rank: int) -> None:
        super().__init__(8, 8, 3)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        is_here = torch.distributed.is_initialized() and torch.distributed.get_rank() == self.rank
        return super().forward(x if x.is_contiguous() or not is_here else 2 * x)


class PartlyUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Transformer(dropout=0.0), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Shares(LightningDataModule):
    """Batches in order: what the ranks get together is what one process gets with batches as large as all theirs."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        ranks = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        sampler: DistributedSampler[Any] = DistributedSampler(self.dataset, shuffle=False, **ranks)
        return DataLoader(self.dataset, self.batch_size, sampler=sampler)


def cnn_without_statistics(second: Callable[[], nn.Module] = lambda: nn.Conv2d(8, 8, 3)) -> nn.Module:
    convolutions = [nn.Conv2d(3, 8, 3), nn.ReLU(), second(), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 4))


CHANNELS_LAST = {"precision": "32-true", "memory_format": "channels_last"}

RUNS: dict[str, dict[str, Any]] = {
    "channels_last": CHANNELS_LAST,
    "auto": {},
    "views": {**CHANNELS_LAST, "kind": Views},
    "views, no rebuilt buckets": {**CHANNELS_LAST, "kind": Views},
    "refused by rank 0": {**CHANNELS_LAST, "net": "fickle 0"},
    "refused by rank 1": {**CHANNELS_LAST, "net": "fickle 1"},
    "foreign optimizer": {"precision": "32-true", "kind": Foreign},
    "half": {**CHANNELS_LAST, "precision": "16-mixed"},
    "checkpointing": {"precision": "32-true", "gradient_checkpointing": "full", "net": "transformer"},
    "unused": {"precision": "32-true", "gradient_checkpointing": "full", "net": "unused"},
    "selective": {"precision": "32-true", "gradient_checkpointing": "selective", "net": "transformer"},
    "budget": {"precision": "32-true", "memory_budget": "120KiB", "net": "transformer"},
    "offloading": {"precision": "32-true", "activation_offloading": {"to": "host", "min_bytes": 64}},
    "preprocess": {"precision": "32-true", "preprocess": [Normalize(0.2, 0.7)]},
    "packing": {"precision": "32-true", "sparse_activations": "auto"},
    "attention": {"precision": "32-true", "flash_attention": "sdpa", "net": "by hand"},
    "attention, checkpointed": {
        "precision": "32-true",
        "flash_attention": "sdpa",
        "gradient_checkpointing": "selective",
        "net": "by hand",
    },
    "accel_ddp, channels_last": CHANNELS_LAST,
    "accel_ddp, views": {**CHANNELS_LAST, "kind": Views},
    "accel_ddp, half": {**CHANNELS_LAST, "precision": "16-mixed"},
    "accel_ddp, checkpointed": {"precision": "32-true", "gradient_checkpointing": "selective", "net": "unused"},
    "attention, by the clock": {"precision": "32-true", "flash_attention": "auto", "net": "by hand"},
}
SLOW = (
    *("views, no rebuilt buckets", "refused by rank 0", "accel_ddp, views"),
    *("checkpointing", "selective", "accel_ddp, half"),
    *("offloading", "packing", "attention, checkpointed"),
)
"""Left to `make test-slow`: others show what they show, by another rank, strategy or model, or all techniques do."""

EPOCHS = {"budget": 4}  # until a plan is made, measured and timed
STRATEGIES = dict.fromkeys(["unused", "views, no rebuilt buckets"], "ddp_find_unused_parameters_true")
STRATEGIES |= dict.fromkeys([run for run in RUNS if run.startswith("accel_ddp")], "accel_ddp")
NETS = {
    "cnn": cnn_without_statistics,
    "fickle 0": lambda: cnn_without_statistics(lambda: Fickle(0)),
    "fickle 1": lambda: cnn_without_statistics(lambda: Fickle(1)),
    "transformer": lambda: Transformer(dropout=0.0),
    "unused": PartlyUnused,
    "by hand": lambda: TinyTransformer(dropout=0.0),
}
TEXT = ("transformer", "unused", "by hand")


def train(run: str, batch_size: int, **options: Any) -> tuple[Supervised, Trainer]:
    settings = dict(RUNS[run])
    net, kind = settings.pop("net", "cnn"), settings.pop("kind", Supervised)
    if run == "budget" and options["devices"] == 1:
        del settings["memory_budget"]  # a batch of twice the size: the plan is another, the numbers are not
    seed_everything(0, verbose=False)
    module = kind(NETS[net]())
    data = Shares((tokens if net in TEXT else images)(8).dataset, batch_size)
    given = {
        "plugins": [AccelPlugin.from_plan(Plan().replace(**settings))],
        "max_epochs": EPOCHS.get(run, 2),
        "gradient_clip_val": 0.5,
    }
    given |= {"use_distributed_sampler": False}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", enable_model_summary=False, **{**quiet, **given, **options})
    trainer.fit(module, data)
    return module, trainer


def weights(module: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def main(folder: Path, runs: list[str], rank: int) -> None:
    for run in runs or RUNS:
        with warnings.catch_warnings():
            if run == "channels_last":
                warnings.filterwarnings("error", message="Grad strides do not match")
            module, trainer = train(run, 4, devices=2, strategy=STRATEGIES.get(run, "ddp"))
        plugin = trainer.precision_plugin
        assert isinstance(plugin, AccelPlugin)
        said = {
            "losses": module.losses,
            "weights": weights(module),
            "report": plugin.report.to_dict(),
            # Lightning itself leaves the module's own forward bound to the instance, when DDP wraps it.
            "instance": [name for name, part in module.net.named_modules() if "forward" in vars(part)],
        }
        (folder / f"{run}.{rank}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    in_ranks(functools.partial(main, Path(sys.argv[1]), sys.argv[2:]), 2, patience_s=200)
