"""What is odd is around the model: batches, loaders, hooks, callbacks, and modules that change in the run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from strangers.table import Made, drawn, drawn_ints, images, loader, made, training, vectors


class _Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 5e-3)


def _conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 4),
    )


@dataclass
class Sample:
    image: Tensor
    label: Tensor
    index: list[int]

    def to(self, *args: Any, **kwargs: Any) -> Sample:
        return replace(self, image=self.image.to(*args, **kwargs), label=self.label.to(*args, **kwargs))


@training
def dataclass_batches_moved_by_a_hook() -> Made:
    def collate(items: Any) -> Sample:
        x, y = (torch.stack(part) for part in zip(*items, strict=True))
        return Sample(x, y, list(range(len(x))))

    class Moves(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = _conv()

        def transfer_batch_to_device(self, batch: Sample, device: Any, dataloader_idx: int) -> Sample:
            return batch.to(device)

        def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
            self.latest = batch.image
            return F.cross_entropy(self.net(batch.image), batch.label)

    return made(Moves(), loader(images(), collate_fn=collate))


@training
def normalised_before_the_transfer() -> Made:
    class Normalises(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = _conv()
            self.seen = 0

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            self.seen += len(x)
            return (x - x.mean(dim=(2, 3), keepdim=True)) / x.std(), y

    return made(Normalises(), loader(images()))


@training
def labelled_and_unlabelled_side_by_side() -> Made:
    class FixMatch(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = _conv()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch["labelled"]
            u, _ = batch["unlabelled"]
            with torch.no_grad():
                confidence, pseudo = self.net(u + 0.05 * torch.randn_like(u)).softmax(1).max(1)
            strong = self.net(u + 0.3 * torch.randn_like(u))
            unsupervised = (F.cross_entropy(strong, pseudo, reduction="none") * (confidence > 0.26)).mean()
            return F.cross_entropy(self.net(x), y) + unsupervised

    both = CombinedLoader({"labelled": loader(images(12)), "unlabelled": loader(images(24), 6)}, "max_size_cycle")
    return made(FixMatch(), both)


@training(epochs=6, resumes=False)
def early_stopping_on_validation() -> Made:
    class Validated(_Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.training_step(batch, batch_idx) * 0 + self.current_epoch)

    stop = EarlyStopping("val", patience=1)
    return made(Validated(), loader(vectors()), loader(vectors(8), shuffle=False), callbacks=[stop])


@training(epochs=6)
def overfits_two_batches() -> Made:
    return made(_Net(), loader(vectors()), overfit_batches=2)


@training
def a_curriculum_by_epoch() -> Made:
    class Curriculum(Dataset[Any]):
        def __init__(self) -> None:
            self.x, self.y, self.noise = drawn(24, 8), drawn_ints(4, 24), 0.0
            self.rng = torch.Generator().manual_seed(5)

        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> Any:
            return self.x[i] + self.noise * torch.randn(8, generator=self.rng), self.y[i]

    class Harder(_Net):
        def on_train_epoch_start(self) -> None:
            self.trainer.train_dataloader.dataset.noise = 0.2 * self.current_epoch
            self.net[2].p = 0.1 * (1 + self.current_epoch % 3)

    return made(Harder(), loader(Curriculum()))


@training
def augmented_by_python_and_numpy() -> Made:
    class Augmented(Dataset[Any]):
        def __init__(self) -> None:
            self.x, self.y = drawn(24, 3, 8, 8).numpy(), drawn_ints(4, 24)

        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> Any:
            x = self.x[i]
            if random.random() < 0.5:
                x = x[:, :, ::-1]
            x = np.roll(x, np.random.randint(-2, 3), axis=1) + np.random.randn(3, 8, 8).astype(np.float32) * 0.05
            return torch.from_numpy(np.ascontiguousarray(x)), self.y[i]

    module = _Net()
    module.net = _conv()
    return made(module, loader(Augmented()))


@training
def buffers_moved_by_momentum() -> Made:
    class Balanced(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("prior", torch.full((4,), 0.25))
            self.register_buffer("seen", torch.tensor(0))
            self.register_buffer("confusion", torch.zeros(4, 4, dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, y = batch
            logits = self.net(x)
            self.prior = 0.9 * self.prior + 0.1 * logits.detach().softmax(1).mean(0)
            self.seen += len(x)
            self.confusion.index_put_((y, logits.argmax(1)), torch.ones_like(y), accumulate=True)
            return {"loss": F.cross_entropy(logits + self.prior.log(), y), "pred": logits.argmax(1)}

    return made(Balanced(), loader(vectors()))


@training
def lazy_modules_met_before_the_fit() -> Made:
    class Lazy(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
            )

        def setup(self, stage: str) -> None:
            self.net(torch.zeros(2, 3, 8, 8))

    return made(Lazy(), loader(images()))


@training
def a_stream_of_unknown_length() -> Made:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for i in range(10):
                start = random.random()
                x = torch.linspace(start, start + 1, 8) + 0.1 * torch.randn(8)
                yield x, torch.tensor(i % 4)

    return made(_Net(), loader(Stream(), 3, shuffle=False))


@training
def a_step_skipped_now_and_then() -> Made:
    class Skips(_Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            if batch_idx % 4 == 3:
                return None
            self.running = 0.5 * getattr(self, "running", torch.zeros(4)) + self.net(x).detach().mean(0)
            return F.cross_entropy(self.net(x) + self.running, y)

    return made(Skips(), loader(vectors()))
