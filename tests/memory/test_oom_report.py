"""The page that a run ends with when it has no memory for a step."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.memory.oom_report import (
    Inventory,
    Remedy,
    StepMemoryError,
    error_with,
    limit_bytes,
    page,
    take_inventory,
    who_asked,
)

GIB = 1 << 30


def inventory(fixed_gib: float = 2, rest_gib: float = 10) -> Inventory:
    parts = {"parameters": int(fixed_gib * GIB), "activations": int(rest_gib * GIB)}
    return Inventory("cuda:0", 12 * GIB, GIB, parts["parameters"], parts["activations"], sum(parts.values()), parts)


def written(of: Inventory, remedies: list[Remedy], batch_size: int | None = 64, accumulate: int | None = 1) -> str:
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nSee the documentation")
    return page(cause, "Step 3 ran out of memory.", "  blocks.1", of, [], remedies, batch_size, accumulate)


SELECTIVE = Remedy("memory={'checkpoint': 'selective'}", "memory: {checkpoint: selective}", 0.95)
FULL = Remedy("memory={'checkpoint': 'full'}", "memory: {checkpoint: full}", 0.2)


@pytest.mark.medium
def test_the_first_line_is_the_allocators_by_which_others_know_the_error() -> None:
    assert written(inventory(), []).split("\n")[0] == "CUDA out of memory. Tried to allocate 1.00 GiB."


@pytest.mark.medium
def test_the_largest_part_comes_first() -> None:
    lines = written(inventory(), []).split("\n")
    at = lines.index("What held it, of 12.0 GiB on cuda:0:")
    assert [line.split()[0] for line in lines[at + 1 : at + 3]] == ["activations", "parameters"]


def test_the_cheapest_that_should_fit_is_marked_in_code_and_its_yaml_given() -> None:
    text = written(inventory(), [SELECTIVE, FULL])
    assert "AccelPlugin(memory={'checkpoint': 'selective'})  # about 12.4 GiB\n" in text
    assert "AccelPlugin(memory={'checkpoint': 'full'})  # about 4,300.8 MiB: the cheapest that should fit\n" in text
    assert "    YAML: memory: {checkpoint: full}\n" in text


@pytest.mark.parametrize(("rest_gib", "size"), [(10, 32), (25, 16), (70, 8)])
def test_the_batch_is_divided_until_it_should_fit(rest_gib: float, size: int) -> None:
    text = written(inventory(rest_gib=rest_gib), [])
    assert f"DataLoader(batch_size={size}), Trainer(accumulate_grad_batches={64 // size})" in text


def test_where_the_model_itself_does_not_fit_no_batch_is_advised() -> None:
    text = written(inventory(fixed_gib=12), [])
    assert "does not fit whatever the batch" in text
    assert "DataLoader" not in text


@pytest.mark.parametrize("cause", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_whoever_catches_the_cause_catches_the_page(cause: type[Exception]) -> None:
    error = error_with("page", cause("no memory"))
    assert isinstance(error, StepMemoryError)
    assert isinstance(error, cause)
    assert error.args == ("page",)
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


def test_what_is_held_is_counted_once_and_on_its_device() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    found = take_inventory(model, [optimizer], [torch.ones(4, 8)], torch.device("cpu"), RuntimeError("no memory"))
    assert found.parts["parameters"] == found.parts["gradients"] == 8 * 8 * 4
    assert found.parts["states of Adam"] == 2 * 8 * 8 * 4 + 4
    assert found.parts["the batch"] == 4 * 8 * 4
    assert 0 < found.held_bytes < found.limit_bytes == limit_bytes(torch.device("cpu"))


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(1 << 60, dtype=torch.uint8)


def test_the_module_that_asked_is_named_with_its_place() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Identity(), Asks())})
    with pytest.raises(RuntimeError) as raised:
        model["encoder"](torch.ones(1))
    named = who_asked(raised.value, model).split("\n")
    assert named[:2] == ["  encoder.1 (Asks)", "  encoder (Sequential)"]
    assert named[2].startswith(f"  at {__file__}:")
    assert named[2].endswith(", in forward")
