"""The standard architectures, as their well-known implementations write them, with out-of-place activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """One ReLU, called twice, and a shortcut added in place."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class Bottleneck(nn.Module):
    """Calls nested in each other, and the shortcut in the argument."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, stride, 1), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, outputs, 1), nn.BatchNorm2d(outputs)
        self.act1, self.act2, self.act3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.act2(self.bn2(self.conv2(out)))
        return self.act3(self.bn3(self.conv3(out)) + self.shortcut(x))


class PreActivation(nn.Module):
    """The shortcut starts behind the first ReLU, whose own input is batch norm's."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.relu = nn.ReLU()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(self.relu(self.bn2(out)))
        out += shortcut
        return out


class ResNet(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(block, 8, 8, 1)
        self.layer2 = self._make_layer(block, 8, 16, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 5)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def _make_layer(self, block: type[nn.Module], inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(block(inputs, outputs, stride), block(outputs, outputs, 1))

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


def vgg() -> nn.Module:
    features = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 5)]
    return nn.Sequential(*features, *head)


class InvertedResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.LeakyReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(12, 12, 3, 1, 1, groups=12), nn.BatchNorm2d(12), nn.LeakyReLU())
        self.project = nn.Sequential(nn.Conv2d(12, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.depthwise(self.expand(x)))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, 8, 1)
        self.norm2, self.relu2, self.conv2 = nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return self.conv2(self.relu2(self.norm2(self.bn_function(inputs))))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"layer1": DenseLayer(3), "layer2": DenseLayer(7)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.layers.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = DoubleConv(3, 4), DoubleConv(4, 4)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.last = DoubleConv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        x = self.middle(self.pool(skip))
        return self.last(torch.cat([skip, self.up(x)], dim=1))


class ConvNormAct(nn.Module):
    """The usual block with optional parts."""

    def __init__(self, inputs: int, outputs: int, act: nn.Module | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.act = act
        self.drop = nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.act is not None:
            x = self.act(x)
        return F.max_pool2d(x, 2)


def networks() -> dict[str, tuple[nn.Module, dict[str, int]]]:
    """Each with the calls in place that are safe, by site."""
    blocks = [f"layer{i}.{j}" for i in (1, 2) for j in (0, 1)]
    body = {f"{part}.body.{i}": 1 for part in ("down", "middle", "last") for i in (2, 5)}
    bottleneck = {f"{block}.act{i}": 1 for block in blocks for i in (1, 2, 3)}
    mobile = (f"{i}.{part}.2" for i in (0, 1) for part in ("expand", "depthwise"))
    return {
        "resnet_basic": (ResNet(BasicBlock), {"relu": 1, **{f"{block}.relu": 2 for block in blocks}}),
        "resnet_bottleneck": (ResNet(Bottleneck), {"relu": 1, **bottleneck}),
        "resnet_preactivation": (ResNet(PreActivation), {"relu": 1, **{f"{block}.relu": 2 for block in blocks}}),
        "vgg": (vgg(), {"2": 1, "5": 1, "9": 1}),
        "mobilenet": (nn.Sequential(InvertedResidual(), InvertedResidual()), dict.fromkeys(mobile, 1)),
        "densenet": (DenseNet(), {f"layers.layer{i}.relu{j}": 1 for i in (1, 2) for j in (1, 2)}),
        "unet": (UNet(), body),
        "optional_parts": (
            nn.Sequential(ConvNormAct(3, 4, nn.ReLU()), ConvNormAct(4, 4, None), ConvNormAct(4, 4, nn.LeakyReLU())),
            {"0.act": 1},
        ),
    }
