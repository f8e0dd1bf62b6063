"""The three networks that memory is measured on: a transformer, a ResNet-50 in shape, a U-Net."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TransformerBlock(nn.Module):
    """Pre-norm, fused attention, GELU: (B, T, D) → (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model: (B, T) tokens → (B, T, vocabulary) logits."""

    def __init__(self, blocks: int = 24, width: int = 192, heads: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """The residual block of He et al. (2016), https://arxiv.org/abs/1512.03385: four times as many channels out."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = nn.Conv2d(channels, 4 * channels, 1, bias=False), nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != 4 * channels:
            shortcut = nn.Conv2d(channels_in, 4 * channels, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """Stages of 3, 4, 6 and 3 bottlenecks: (B, 3, H, W) → (B, 10). ``width`` 64 is the original's."""

    def __init__(self, width: int = 16, stages: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        channels_in = width
        for stage, count in enumerate(stages):
            for index in range(count):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(channels_in, width << stage, stride))
                channels_in = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.pool(self.stem(x))).mean((2, 3)))


class DoubleConv(nn.Module):
    """Twice convolution, norm, ReLU: (B, C, H, W) → (B, C', H, W)."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in (channels_in, channels):
            layers += [nn.Conv2d(size, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(True)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Ronneberger et al. (2015), https://arxiv.org/abs/1505.04597: (B, 1, H, W) → (B, 2, H, W)."""

    def __init__(self, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        sizes = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip([1, *sizes], sizes, strict=False))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in reversed(sizes[:-1]))
        self.up = nn.ModuleList(DoubleConv(2 * size, size) for size in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, down in enumerate(self.down):
            x = down(x if not index else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for lift, up in zip(self.lift, self.up, strict=True):
            x = up(torch.cat([skips.pop(), lift(x)], dim=1))
        return self.head(x)


def transformer_task(
    blocks: int = 24, batch: int = 4, length: int = 128
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(256, (batch, length + 1))
    return Transformer(blocks), lambda model: F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )


def resnet_task(
    stages: tuple[int, ...] = (3, 4, 6, 3), batch: int = 8, size: int = 96
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return ResNet50(stages=stages), lambda model: F.cross_entropy(model(images), labels)


def unet_task(batch: int = 2, size: int = 96) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 1, size, size), torch.randint(2, (batch, size, size))
    return UNet(), lambda model: F.cross_entropy(model(images), labels)
