"""On a GPU no technique has the host wait for the device in a step, once the first steps are over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_accel import Plan, accelerate
from lightning_accel.core.host import Host
from lightning_accel.core.tree import map_tensors
from lightning_accel.techniques.loss import technique as loss
from lightning_accel.techniques.registry import declarations
from support.models import TASKS, TEXT, Task
from support.shown_values import shown_values
from support.technique_table import ALL, HOST_MEMORY, off

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # a prototype, torch says
]

FIRST_STEPS = 8  # in which techniques are tried, blocks captured and compiled, and memory looked at

SETTINGS: dict[str, dict[str, Any]] = {
    f"{name}={value}": {name: HOST_MEMORY if value == "host" else value}
    for name, declaration in declarations().items()
    for value in dict.fromkeys((declaration.switch(declaration.default), *shown_values(declaration)))
    if value != declaration.off
} | {"all": ALL}

WAITS = {
    "activation_offloading=disk": "waits for what it writes to a file",
    "sparse_activations=auto": "counts what is not zero, to know how much memory that takes",
    "precision=16-mixed": "torch's own scaler asks whether gradients have overflowed",
}


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loss, "FEWEST_CLASSES", 11)
    monkeypatch.setattr(loss, "SMALLEST_BYTES", 0)
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = flags


@pytest.mark.parametrize("task", [TASKS["cnn"], TEXT], ids=["cnn", "text"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in WAITS])
def test_a_settled_step_does_not_wait_for_the_device(name: str, task: Task) -> None:
    model = task.model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = Plan().replace(**off() | SETTINGS[name] | {"trust": "checked"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something is not to be had on this card, or in this model
        handle = accelerate(model, plan, optimizers=optimizer, host=Host.detect("cuda"))
        batches = [map_tensors(torch.Tensor.cuda, task.batch(step)) for step in range(FIRST_STEPS + 2)]

        def step(batch: Any) -> None:
            inputs, targets = batch
            optimizer.zero_grad()
            with handle.step():
                inputs = handle.batch(inputs)
                targets = inputs["labels"] if isinstance(inputs, dict) else targets
                found = task.loss(model(inputs), targets)
            found.backward()  # no scaler: without float16 it passes everything through
            optimizer.step()

        for batch in batches[:FIRST_STEPS]:
            step(batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches[FIRST_STEPS:]:
                step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    handle.undo()


def test_a_step_that_waits_would_be_seen() -> None:
    """Of the test above: that the device says so at all."""
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(2, device="cuda").sum().item()
