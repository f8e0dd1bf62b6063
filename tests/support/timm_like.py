"""Image models in the manner of timm, at a size for tests: (B, 3, 16, 16) → (B, CLASSES)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, SIDE = 4, 16


class DropPath(nn.Module):
    """Leaves the residual branch out for some samples of the batch."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * keep.div_(1 - self.rate)


class LayerScale(nn.Module):
    def __init__(self, dim: int, inplace: bool = False) -> None:
        super().__init__()
        self.inplace, self.gamma = inplace, nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(hidden, dim), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class Attention(nn.Module):
    """Fused or spelled out, as a switch has it."""

    def __init__(self, dim: int, fused_attn: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.scale, self.fused_attn = heads, (dim // heads) ** -0.5, fused_attn
        self.qkv, self.attn_drop = nn.Linear(dim, dim * 3), nn.Dropout(0.0)
        self.proj, self.proj_drop = nn.Linear(dim, dim), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            x = self.attn_drop(((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class Block(nn.Module):
    def __init__(self, dim: int, fused_attn: bool = False) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, fused_attn)
        self.ls1, self.drop_path1 = LayerScale(dim, inplace=True), DropPath()
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)
        self.ls2, self.drop_path2 = LayerScale(dim), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, fused_attn: bool = False, dim: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.Sequential(Block(dim, fused_attn), Block(dim, fused_attn))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.fn = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


def conv_mixer(dim: int = 8) -> nn.Module:
    def block() -> nn.Module:
        across = nn.Sequential(nn.Conv2d(dim, dim, 5, groups=dim, padding="same"), nn.GELU(), nn.BatchNorm2d(dim))
        return nn.Sequential(Residual(across), nn.Conv2d(dim, dim, 1), nn.GELU(), nn.BatchNorm2d(dim))

    stem = nn.Sequential(nn.Conv2d(3, dim, 4, stride=4), nn.GELU(), nn.BatchNorm2d(dim))
    return nn.Sequential(stem, block(), block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, CLASSES))


class MixerBlock(nn.Module):
    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.mlp_tokens = nn.LayerNorm(dim), Mlp(tokens, 2 * tokens)
        self.norm2, self.mlp_channels, self.drop_path = nn.LayerNorm(dim), Mlp(dim, 2 * dim), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))
        return x + self.drop_path(self.mlp_channels(self.norm2(x)))


class MlpMixer(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, dim, 4, stride=4), nn.Linear(dim, CLASSES)
        self.blocks = nn.Sequential(MixerBlock(dim, 16), MixerBlock(dim, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(dim=1))


class SqueezeExcite(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Conv2d(dim, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, dim, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(x.mean((2, 3), keepdim=True)))))


class Bottleneck(nn.Module):
    """Of a ResNet, with Squeeze-and-Excitation."""

    def __init__(self, inputs: int, dim: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(inputs, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2 = nn.Conv2d(4, 4, 3, stride=stride, padding=1, groups=2, bias=False)
        self.bn2, self.act2 = nn.BatchNorm2d(4), nn.ReLU()
        self.conv3, self.bn3, self.se = nn.Conv2d(4, dim, 1, bias=False), nn.BatchNorm2d(dim), SqueezeExcite(dim)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, dim, 1, stride=stride, bias=False), nn.BatchNorm2d(dim))
        self.drop_path, self.act3 = DropPath(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        x = self.drop_path(self.se(self.bn3(self.conv3(x))))
        x += self.downsample(shortcut)
        return self.act3(x)


def residual_net() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    stages = nn.Sequential(Bottleneck(8, 8), Bottleneck(8, 16, stride=2))
    return nn.Sequential(stem, stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


class Tokens(nn.Module):
    """A block of attention over the pixels of a map."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block = Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        return self.block(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(B, C, H, W)


def coat_net() -> nn.Module:
    """Convolutions first, attention after."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.GELU())
    middle = nn.Sequential(Bottleneck(8, 16, stride=2), Tokens(16), Tokens(16))
    return nn.Sequential(stem, middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


class Windows(nn.Module):
    """Attention within blocks of 4 x 4 pixels, then over a grid of distant ones, as MaxViT has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block, self.grid = Block(dim), Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        near = x.view(B, H // 4, 4, W // 4, 4, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, C)
        near = self.block(near).view(B, H // 4, W // 4, 4, 4, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, C)
        far = near.view(B, 4, H // 4, 4, W // 4, C).permute(0, 2, 4, 1, 3, 5).contiguous().view(-1, 16, C)
        far = self.grid(far).view(B, H // 4, W // 4, 4, 4, C).permute(0, 3, 1, 4, 2, 5)
        return far.contiguous().view(B, H, W, C)


class MaxViT(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, dim, 3, stride=2, padding=1), Bottleneck(dim, dim)
        self.windows, self.norm, self.head = Windows(dim), nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.windows(self.conv(self.stem(x)).permute(0, 2, 3, 1).contiguous())
        return self.head(self.norm(x).mean(dim=(1, 2)))


class UNet(nn.Module):
    """What went down is concatenated to what comes up."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Module:
            first = (nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
            return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.LeakyReLU(0.1))

        self.down1, self.down2, self.bottom = double(3, dim), double(dim, dim), double(dim, dim)
        self.up2, self.up1 = nn.ConvTranspose2d(dim, dim, 2, stride=2), nn.Upsample(scale_factor=2)
        self.merge2, self.merge1 = double(2 * dim, dim), double(2 * dim, dim)
        self.head = nn.Conv2d(dim, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.merge2(torch.cat([self.up2(self.bottom(F.max_pool2d(second, 2))), second], dim=1))
        return self.head(self.merge1(torch.cat([self.up1(x), first], dim=1))).mean(dim=(2, 3))


NETWORKS = {
    "vision transformer": VisionTransformer,
    "vision transformer with fused attention": lambda: VisionTransformer(fused_attn=True),
    "conv mixer": conv_mixer,
    "mlp mixer": MlpMixer,
    "residual net with squeeze and excitation": residual_net,
    "convolutions, then attention": coat_net,
    "windows, then a grid": MaxViT,
    "u-net": UNet,
}
