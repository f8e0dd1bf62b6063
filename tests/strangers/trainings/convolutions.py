"""Convolutions of many kinds."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from strangers.table import Items, Made, drawn, drawn_ints, images, loader, made, training


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
def stochastic_depth_in_a_resnet() -> Made:
    class Block(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p
            self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            if self.training:
                keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.p)
                out = out * keep / (1 - self.p)
            return F.relu(x + out)

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *[Block(0.1 * i) for i in range(1, 4)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return made(_Classifier(net), loader(images()))


@training
def depthwise_with_squeeze_and_excitation() -> Made:
    class MBConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expand, self.depth = (
                nn.Conv2d(8, 16, 1, bias=False),
                nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            )
            self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.BatchNorm2d(8)
            self.se = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.SiLU(), nn.Conv2d(4, 16, 1), nn.Sigmoid()
            )
            self.project, self.act = nn.Conv2d(16, 8, 1, bias=False), nn.Hardswish(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.bn2(self.depth(self.act(self.bn1(self.expand(x))))))
            return x + self.bn3(self.project(y * self.se(y)))

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        MBConv(),
        MBConv(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Dropout(0.2),
        nn.Linear(8, 4),
    )
    return made(_Classifier(net), loader(images()))


@training
def group_norm_and_weight_standardisation() -> Made:
    class WSConv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            w = (w - w.mean(dim=(1, 2, 3), keepdim=True)) / (w.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
            return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)

    net = nn.Sequential(
        WSConv(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.Mish(),
        WSConv(8, 8, 3, dilation=2),
        nn.GroupNorm(2, 8),
        nn.ELU(inplace=True),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    return made(_Classifier(net), loader(images()))


@training
def video_in_three_dimensions() -> Made:
    net = nn.Sequential(
        nn.Conv3d(3, 6, 3, padding=1),
        nn.BatchNorm3d(6),
        nn.ReLU(True),
        nn.MaxPool3d(2),
        nn.Conv3d(6, 6, (1, 3, 3)),
        nn.ReLU(True),
        nn.Dropout3d(0.2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )
    clips = list(zip(drawn(24, 3, 4, 8, 8), drawn_ints(4, 24), strict=True))
    return made(_Classifier(net), loader(Items(clips)))


@training
def batch_norm_with_accumulated_gradients() -> Made:
    return made(
        _Classifier(_conv()),
        loader(images(), 3),
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
    )


@training
def style_of_patches_unfolded() -> Made:
    class Unfolds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.head = nn.Parameter(torch.randn(6, 27) * 0.1), nn.Linear(6 * 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            columns = F.unfold(x, 3, stride=2, padding=1)
            y = F.fold(self.kernel @ columns, (4, 4), 1)
            return self.head(F.dropout(F.gelu(y), 0.1, self.training).reshape(len(x), -1))

    return made(_Classifier(Unfolds()), loader(images()))
