"""What a run would decide on a host before its first step: the techniques' own answers, setting by setting.

Nothing is computed and nothing is asked of the machine that this runs on: a host that is not at hand will do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.assembly import module_techniques
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch
from lightning_accel.settings import Plan, PrecisionSetting
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.flash_attention import FlashAttention
from lightning_accel.techniques.flash_attention.backends import BACKENDS
from lightning_accel.techniques.mixed_precision import resolve_precision

_PRECISIONS: tuple[PrecisionSetting, ...] = ("16-mixed", "bf16-mixed")
_NOTHING: dict[str, Any] = {"flash_attention": "off", "inplace_activations": False, "memory_format": "preserve"}
# What a plan leaves off unless it is asked for.
_ASKED_FOR: tuple[tuple[str, Any], ...] = (
    ("gradient_checkpointing", "full"),
    ("gradient_checkpointing", "selective"),
    ("gradient_checkpointing", {"budget": "12GiB"}),
    ("activation_offloading", "host"),
    ("activation_offloading", "disk"),
    ("sparse_activations", "auto"),
    ("compile", "on"),
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of one setting on one host.

    Attributes:
        setting: The setting with its value: ``'memory_format="auto"'``.
        is_had: Whether it acts there, or is tried.
        brief: In a word or two: the precision, the attention kernels that are tried, ``"tried"``, ``"yes"``, ``"no"``.
        words: What is done, or why not, with the mend.
    """

    setting: str
    is_had: bool
    brief: str
    words: str


class ExampleModel(nn.Module):
    """Something for every technique: convolutions, activations, attention by hand, repeated blocks, dropout.

    Takes images (B, 3, 16, 16), returns logits (B, 10).
    """

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.convolutions = nn.ModuleList(ConvolutionBlock(channels) for _ in range(2))
        self.attention = nn.ModuleList(AttentionBlock(channels) for _ in range(2))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for convolution in self.convolutions:
            x = convolution(x)
        tokens = x.flatten(2).mT
        for attention in self.attention:
            tokens = attention(tokens)
        logits: Tensor = self.head(tokens.mean(dim=1))
        return logits


class ConvolutionBlock(nn.Module):
    """(B, C, H, W) → (B, C, H, W), without random numbers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.norm(self.convolution(x)))
        return x + y


class AttentionBlock(nn.Module):
    """(B, T, C) → (B, T, C), with dropout."""

    def __init__(self, channels: int, p: float = 0.1) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.GELU(), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        x = x + scores.softmax(dim=-1) @ v
        y: Tensor = self.mlp(x)
        return x + y


def by_default(host: Host, model: nn.Module) -> list[Decision]:
    """What the settings that are on by default, those of ``AccelPlugin()``, come to on ``host``.

    Args:
        host: The machine.
        model: What is looked at for sites; it is left as it is, and need not be on the host's device.
    """
    plan = Plan()
    precision, reason = resolve_precision("auto", host)
    words = f"{precision}: {reason}"
    decisions = [
        Decision(setting='precision="auto"', is_had=precision != "32-true", brief=f"`{precision}`", words=words)
    ]
    for technique in module_techniques(plan, model, device=torch.device(host.device_type)):
        setting = _written(technique.name, getattr(plan, technique.name))
        decisions.append(_decision(setting, technique, host, model))
    return decisions


def when_asked(host: Host, model: nn.Module) -> list[Decision]:
    """What every other setting comes to on ``host`` when it is asked for by itself.

    Args:
        host: The machine.
        model: As in :func:`by_default`.
    """
    decisions = [_precision(setting, host) for setting in _PRECISIONS]
    decisions += [_attention(backend, host) for backend in BACKENDS]
    for name, value in _ASKED_FOR:
        plan = Plan(**_NOTHING, **{name: value})
        (technique,) = module_techniques(plan, model, device=torch.device(host.device_type))
        decisions.append(_decision(_written(name, value), technique, host, model))
    return decisions


def _precision(setting: PrecisionSetting, host: Host) -> Decision:
    precision, reason = resolve_precision(setting, host)
    is_had = precision == setting
    return Decision(
        setting=_written("precision", setting),
        is_had=is_had,
        brief="yes" if is_had else "no",
        words=reason if is_had else f"{precision}: {reason}",
    )


def _attention(backend: str, host: Host) -> Decision:
    whole = FlashAttention(Plan().attention).unavailable(host)
    reason = whole or BACKENDS[backend].unavailable(host)
    return Decision(
        setting=_written("flash_attention", backend),
        is_had=reason is None,
        brief="yes" if reason is None else "no",
        words=reason or "used wherever the numbers agree",
    )


def _decision(setting: str, technique: Technique, host: Host, model: nn.Module) -> Decision:
    reason = technique.unavailable(host)
    if reason is not None:
        return Decision(setting=setting, is_had=False, brief="no", words=reason)
    try:
        claims = list(technique.patches(model, host))
    finally:
        technique.close()
    if technique.acts_without_sites:
        words = technique.status or "decides by what the first steps measure"
        return Decision(setting=setting, is_had=True, brief="yes", words=words)
    sites = sum(isinstance(claim, Patch) for claim in claims)
    kernels = technique.candidates(host) if isinstance(technique, FlashAttention) else []
    when = "asked at every call" if technique.trial_step is None else "tried on the first batch"
    found = f"{sites} site{'' if sites == 1 else 's'}, {when}"
    found += f" with {', '.join(kernels)}" if kernels else ""
    refusals = Counter(claim.reason for claim in claims if not isinstance(claim, Patch))
    alone = [f"{count} left alone: {reason}" for reason, count in refusals.items()]
    return Decision(
        setting=setting,
        is_had=sites > 0,
        brief=", ".join(kernels) or (("yes" if technique.trial_step is None else "tried") if sites else "no"),
        words="; ".join([found, *alone] if sites else alone) or "no site in this model",
    )


def _written(name: str, value: Any) -> str:
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
