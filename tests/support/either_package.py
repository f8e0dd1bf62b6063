"""A program of one of Lightning's packages, or of both: ``python either_package.py FOLDER PACKAGE [PACKAGE]``.

It prints what came of it as JSON: package → what held of its runs.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelCLI, AccelPlugin, AccelStrategy
from lightning_accel.callbacks import ExportBest, GpuStats, SpeedMemoryLogger, TraceCallback

# Before Lightning, as sorted imports have it.
from lightning_accel.settings import Plan

BLOCK = {
    "gradient_checkpointing": {"mode": "full", "blocks": ["net.0"]},
    **{"precision": "32-true", "optimizer": "off", "trust": "checked"},  # what changes no number
}


class UsersPlugin(AccelPlugin):
    """As users derive theirs."""

    def connect(self, *args: Any) -> Any:
        self.is_connected = True
        return super().connect(*args)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator)), 4
    )


def module_class(package: Any) -> Any:
    class Net(package.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            block = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
            self.net = nn.Sequential(block, nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def train_dataloader(self) -> Any:
            return loader()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Net


class Runs:
    """The runs of one package."""

    def __init__(self, name: str, folder: Path) -> None:
        self.package = importlib.import_module(name)
        self.kind = module_class(self.package)
        self.folder = folder / name
        self.settings: dict[str, Any] = {
            **{"max_epochs": 2, "accelerator": "cpu", "gradient_clip_val": 0.05, "enable_progress_bar": False},
            **{"enable_model_summary": False, "logger": False, "default_root_dir": self.folder},
        }

    def fit(self, ckpt_path: Any = None, **settings: Any) -> tuple[Any, list[Any]]:
        self.package.seed_everything(1, verbose=False)
        module = self.kind()
        trainer = self.package.Trainer(**{**self.settings, **settings})
        trainer.fit(module, ckpt_path=ckpt_path)
        return trainer, [parameter.detach().clone() for parameter in module.parameters()]

    def held(self) -> dict[str, Any]:
        trainer, plain = self.fit()
        trainer.save_checkpoint(self.folder / "plain.ckpt")
        plugin = UsersPlugin.from_plan(Plan().replace(**BLOCK))
        trainer, fast = self.fit(plugins=[plugin])
        trainer.save_checkpoint(self.folder / "fast.ckpt")
        copied = pickle.loads(pickle.dumps(plugin))
        trainer, by_name = self.fit(strategy="accel", plugins=[copied])
        is_its_strategy = isinstance(trainer.strategy, self.package.strategies.SingleDeviceStrategy)
        _, by_strategy = self.fit(strategy=AccelStrategy(), plugins=[AccelPlugin.from_plan(Plan().replace(**BLOCK))])
        logger = SpeedMemoryLogger()
        callbacks = [logger, TraceCallback(), GpuStats()]
        _, watched = self.fit(plugins=[AccelPlugin.from_plan(Plan().replace(**BLOCK))], callbacks=callbacks)
        autocasting = AccelPlugin(precision="bf16-mixed")
        self.fit(plugins=[autocasting])
        self.fit(plugins=[AccelPlugin()])
        refused = ""
        try:
            self.package.Trainer(plugins=[AccelPlugin()], precision="32-true", **self.settings)
        except ValueError as error:
            refused = str(error)
        cli = AccelCLI(
            self.kind,
            args=["fit", "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--accel.trust=checked"],
            save_config_callback=None,
        )
        mixed = self.package.plugins.precision.MixedPrecision
        return {
            "is of its Trainer's package": isinstance(plugin, self.package.plugins.precision.Precision),
            "is mixed if it autocasts": (isinstance(plugin, mixed), isinstance(autocasting, mixed)) == (False, True),
            "the user's override is called": plugin.is_connected,
            "applied": plugin.report.applied("gradient_checkpointing"),
            "same weights": [_are_equal(plain, each) for each in (fast, by_name, by_strategy, watched)],
            "measured": len(logger.history),
            "are its callbacks": all(isinstance(one, self.package.Callback) for one in (*callbacks, ExportBest())),
            "refused": refused,
            "is its strategy": is_its_strategy,
            "cli": isinstance(cli.trainer, self.package.Trainer),
        }


def _are_equal(ones: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def main(folder: Path, *names: str) -> None:
    runs = [Runs(name, folder) for name in names]
    found: dict[str, Any] = {one.package.__name__: one.held() for one in runs}
    for one in runs:
        for other in runs:
            for file in ("plain.ckpt", "fast.ckpt"):
                trainer, _ = one.fit(
                    ckpt_path=other.folder / file,
                    max_epochs=3,
                    plugins=[AccelPlugin.from_plan(Plan().replace(**BLOCK))],
                )
                found[one.package.__name__].setdefault("resumed", []).append(trainer.global_step)
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("lightning", "pytorch_lightning")]
    found["imported"] = sorted({name.partition(".")[0] for name in loaded})
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
