"""AccelXLAPlugin where there is no torch_xla; where there is, tests/xla/ runs it: ``make test-xla``."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from lightning_accel import AccelXLAPlugin
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.syncfree_steps import step_syncfree

without_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is here")


@without_xla
def test_it_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match="AccelXLAPlugin: torch_xla is not installed: pip install torch_xla"):
        AccelXLAPlugin()


def test_float16_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match=r"16-mixed.*needs a gradient scaler.*Allowed: 'auto', '32-true', 'bf16-mixed'"
    ):
        AccelXLAPlugin(precision="16-mixed")


def test_a_misspelt_setting_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="'loder'; did you mean 'loader'"):
        AccelXLAPlugin(loder="auto")


PARAMETERS = [nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.AdamW(PARAMETERS), "a parameter is on cpu"),
        (torch.optim.AdamW(PARAMETERS, foreach=True), "foreach=True was chosen for it"),
        (torch.optim.AdamW([{"params": []}, {"params": PARAMETERS}]), "it has no parameters"),
        (torch.optim.AdamW(PARAMETERS, lr=torch.tensor(0.1), capturable=False), "its lr is a tensor"),
        (torch.optim.SGD(PARAMETERS, lr=0.1), "without momentum there is no state"),
        (torch.optim.RMSprop(PARAMETERS), "torch_xla has no step of RMSprop"),
        (torch.optim.LBFGS(PARAMETERS), "LBFGS is none of the optimizers of torch"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_optimizer_that_torch_xla_does_not_step_is_left_with_the_reason(
    optimizer: torch.optim.Optimizer, reason: str
) -> None:
    found = step_syncfree("optimizer 0", optimizer)
    assert isinstance(found, Site)
    assert found.why_not.startswith(reason)
