"""What a run would decide on a host before its first step, setting by setting, as the techniques answer.

Nothing is computed or read from this machine, so the host may be any machine.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from lightning_accel.assembly import build_context
from lightning_accel.core.host import Host
from lightning_accel.settings import Plan
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.registry import declarations
from lightning_accel.techniques.technique_context import Forecast


class ExampleModel(nn.Module):
    """A model with sites for every technique: convolutions, activations, explicit attention, repeated blocks, dropout.

    Takes images (B, 3, 16, 16), returns logits (B, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        channels = 16
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

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        x = x + scores.softmax(dim=-1) @ v
        y: Tensor = self.mlp(x)
        return x + y


def forecasts(plan: Plan, host: Host, model: nn.Module) -> dict[str, Forecast]:
    """Returns what each setting of ``plan`` would do on ``host``. The model is searched for sites, on any device.

    Returns:
        Setting with its value, such as ``"memory_format: auto"`` → the technique's forecast.
    """
    declared = declarations()
    around = build_context(plan, model, host, device=torch.device(host.device_type), in_plain_loop=True)
    return {
        f"{name}: {declared[name].switch(around.settings[name])}": _forecast(one, host, model)
        for one in around.techniques
        for name in [one.name]
    }


def _forecast(technique: Technique, host: Host, model: nn.Module) -> Forecast:
    told, traits = technique.run.forecast, technique.traits
    reason = technique.unavailable(host)
    if reason is not None and (told is None or told.acts):
        return Forecast(acts=False, brief="no", words=reason, is_missed=told is None or told.is_missed)
    if told is not None and told.words:
        return told
    try:
        claims = list(technique.sites(model, host))
    finally:
        technique.run.at_end.close()
    if traits.acts_without_sites:
        words = technique.run.status or "decides by what the first steps measure"
        return Forecast(acts=True, brief="yes", words=words)
    sites = sum(not claim.why_not for claim in claims)
    is_tried = traits.trial_step is not None
    when = "tried on the first batch" if is_tried else "asked at every call"
    found = f"{sites} site{'' if sites == 1 else 's'}, {when}"
    found += f" with {told.brief}" if told is not None else ""
    refusals = Counter(claim.why_not for claim in claims if claim.why_not)
    alone = [f"{count} left alone: {reason}" for reason, count in refusals.items()]
    return Forecast(
        acts=sites > 0,
        brief=told.brief if told is not None else (("tried" if is_tried else "yes") if sites else "no"),
        words="; ".join([found, *alone] if sites else alone) or "no site in this model",
    )
