"""Images: noise and masks drawn on them, and networks of many kinds of convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from strangers.table import Made, images, loader, made, training


class _Classifier(LightningModule):
    def __init__(self, net: nn.Module, lr: float = 0.01) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def _conv(channels: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * 16, 4),
    )


@training
def mixup() -> Made:
    class Mixup(_Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            lam = np.random.beta(0.4, 0.4)
            index = torch.randperm(x.size(0))
            out = self(lam * x + (1 - lam) * x[index, :])
            return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])

    return made(Mixup(_conv()), loader(images()))


@training
def cutmix() -> Made:
    class CutMix(_Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            if np.random.rand() < 0.7:
                order = torch.randperm(len(x))
                top, left = np.random.randint(5), np.random.randint(5)
                x = x.clone()
                x[:, :, top : top + 4, left : left + 4] = x[order, :, top : top + 4, left : left + 4]
                out = self(x)
                return 0.75 * F.cross_entropy(out, y) + 0.25 * F.cross_entropy(out, y[order])
            return F.cross_entropy(self(x), y)

    return made(CutMix(_conv()), loader(images()))


@training
def dropout_on_the_images() -> Made:
    net = nn.Sequential(
        nn.Dropout(0.2),
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    return made(_Classifier(net), loader(images()), loader(images(8), shuffle=False))


@training
def dropout_of_whole_channels() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.ReLU(True),
        nn.Dropout2d(0.3),
        nn.Conv2d(12, 8, 3),
        nn.FeatureAlphaDropout(0.1),
        nn.SELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    return made(_Classifier(net), loader(images()))


@training
def vit_with_dropout_on_patches() -> Made:
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 16, 2, stride=2)
            self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16) * 0.02)
            self.drop = nn.Dropout(0.1)
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(self.patch(x)).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
            return self.head(self.blocks(self.drop(x))[:, 0])

    return made(_Classifier(ViT(), 0.02), loader(images()))


@training
def unet_of_masks() -> Made:
    def double(i: int, o: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1),
            nn.BatchNorm2d(o),
            nn.ReLU(True),
            nn.Conv2d(o, o, 3, padding=1),
            nn.ReLU(True),
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2, self.middle = double(3, 6), double(6, 12), double(12, 12)
            self.up1, self.up2 = (
                nn.ConvTranspose2d(12, 12, 2, 2),
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
            )
            self.dec1, self.dec2, self.out = double(24, 12), double(18, 6), nn.Conv2d(6, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            c = self.middle(F.max_pool2d(b, 2))
            d = self.dec1(torch.cat([self.up1(c), b], dim=1))
            return self.out(self.dec2(torch.cat([self.up2(d), a], dim=1)))

    class Segments(_Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            mask = (x.mean(dim=1, keepdim=True) > 0).float()
            prob = torch.sigmoid(self(x))
            inter = (prob * mask).view(len(x), -1).sum(1)
            dice = 1 - ((2 * inter + 1) / (prob.view(len(x), -1).sum(1) + mask.view(len(x), -1).sum(1) + 1)).mean()
            loss = dice + F.binary_cross_entropy(prob.float(), mask)
            self.log("dice", dice, on_step=False, on_epoch=True)
            return loss

    return made(Segments(UNet()), loader(images()))


@training
def gradients_viewed_flat_after_backward() -> Made:
    class Watched(_Classifier):
        def on_after_backward(self) -> None:
            flat = torch.cat([p.grad.view(-1) for p in self.parameters()])
            self.norms = [*getattr(self, "norms", []), flat.norm()]

        def on_train_epoch_end(self) -> None:
            self.vector = nn.utils.parameters_to_vector(self.parameters()).detach()
            self.log("weights", self.vector.norm())

    return made(Watched(_conv()), loader(images()))


@training
def features_stored_by_hooks_and_viewed_flat() -> Made:
    class GradCAM(_Classifier):
        def __init__(self) -> None:
            super().__init__(_conv())
            self.features: dict[str, Tensor] = {}
            self.net[0].register_forward_hook(self._keep("conv"))
            self.net[3].register_forward_hook(self._keep("pool"))

        def _keep(self, name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                self.features[name] = output.detach()

            return hook

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            pool = self.features["pool"]
            gram = pool.view(pool.size(0), pool.size(1), -1)
            return loss + 0.01 * (gram @ gram.transpose(1, 2)).mean().to(loss.dtype)

    return made(GradCAM(), loader(images()))
