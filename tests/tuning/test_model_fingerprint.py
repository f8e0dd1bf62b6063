"""A model's description: other for whatever its modules compute otherwise with, the same in every process."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from lightning_accel.tuning.model_fingerprint import MOST, UntoldError, described


@dataclasses.dataclass
class Settings:
    scale: float


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


def scaled(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * scale


def holding(value: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.held = value
    return module


def with_buffer(value: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("mask", value)
    return module


def hooked(number: int) -> nn.Module:
    module = nn.Linear(2, 2)
    for _ in range(number):
        module.register_forward_hook(print)
    return module


LONG = torch.ones(1024, 1024, dtype=torch.bool)

PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "functions of torch": (lambda: holding(F.gelu), lambda: holding(F.relu)),
    "functions of Python": (lambda: holding(F.silu), lambda: holding(F.softmax)),
    "operators": (lambda: holding(torch.ops.aten.relu), lambda: holding(torch.ops.aten.tanh)),
    "activations of a layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="relu"),
    ),
    "what a function encloses": (lambda: holding(scaled(1.0)), lambda: holding(scaled(30.0))),
    "lambdas": (lambda: holding(lambda x: x + 1), lambda: holding(lambda x: x + 2)),
    "partial functions": (
        lambda: holding(functools.partial(F.gelu, approximate="none")),
        lambda: holding(functools.partial(F.gelu, approximate="tanh")),
    ),
    "a dict": (lambda: holding({"scale": 1}), lambda: holding({"scale": 30})),
    "a dataclass": (lambda: holding(Settings(1)), lambda: holding(Settings(30))),
    "slots": (lambda: holding(Slotted(1)), lambda: holding(Slotted(30))),
    "a namespace of arguments": (
        lambda: holding(argparse.Namespace(scale=1)),
        lambda: holding(argparse.Namespace(scale=30)),
    ),
    "a configuration of transformers": (
        lambda: holding(BertConfig(layer_norm_eps=1e-5)),
        lambda: holding(BertConfig(layer_norm_eps=1e-6)),
    ),
    "a distribution": (
        lambda: holding(torch.distributions.Normal(0.0, 1.0)),
        lambda: holding(torch.distributions.Normal(0.0, 30.0)),
    ),
    "a hidden module": (lambda: holding([nn.ReLU()]), lambda: holding([nn.GELU()])),
    "a plain tensor": (lambda: holding(torch.zeros(2)), lambda: holding(torch.ones(2))),
    "a buffer": (lambda: with_buffer(torch.ones(8, 8).tril()), lambda: with_buffer(torch.ones(8, 8))),
    "a large buffer": (lambda: with_buffer(LONG.tril()), lambda: with_buffer(LONG)),
    "a window of a large buffer": (
        lambda: with_buffer(LONG.tril().triu(-63)),
        lambda: with_buffer(LONG.tril().triu(-65)),
    ),
    "hooks": (lambda: hooked(0), lambda: hooked(1)),
    "mode": (lambda: nn.Dropout(), lambda: nn.Dropout().eval()),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
def test_models_that_compute_otherwise_have_other_descriptions(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module]
) -> None:
    assert described(one()) == described(one())
    assert described(one()) != described(other())


class Ordinary(LightningModule):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT2LMHeadModel(GPT2Config(n_positions=8, n_embd=8, n_layer=1, n_head=2))
        self.bert = BertModel(
            BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        )
        self.cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1))
        self.generators = {"torch": torch.Generator(), "Python": random.Random(1)}
        self.me, self.module = [self], types


def test_ordinary_models_can_be_described_while_they_train() -> None:
    """A LightningModule leads on to its Trainer, and that to everything."""
    model = Ordinary()
    before = described(model)
    model.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    assert described(model) != before  # it has one
    other = Ordinary(2.0)
    other.trainer = model.trainer
    assert described(other) != described(model)


@pytest.mark.medium
def test_another_process_finds_the_same_words() -> None:
    """Whatever it orders sets by, and wherever it puts its objects."""
    program = (
        "import functools, torch; from torch import nn; from lightning_accel.tuning.model_fingerprint import described;"
        "m = nn.TransformerEncoderLayer(8, 2, 16); m.held = {'a', 'b', 'c'}, {1: functools.partial(torch.relu)}, m;"
        "words = described(m)"
    )
    here: dict[str, Any] = {}
    exec(program, here)
    there = subprocess.run(
        [sys.executable, "-c", f"{program}; print(words)"],
        env={"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout == f"{here['words']}\n"


@pytest.mark.parametrize(
    "value", [iter([1]), object(), list(range(MOST))], ids=["an iterator", "an object", "too many values"]
)
def test_what_shows_nothing_of_what_it_holds_cannot_be_told(value: Any) -> None:
    with pytest.raises(UntoldError):
        described(holding(value))
