"""Activation offloading as a technique: what it does in a run, what it says, how far ahead it brings tensors back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.host import Host, HostKind
from lightning_accel.core.report import AccelWarning
from lightning_accel.engine import Engine
from lightning_accel.memory.buffers import OffloadingError
from lightning_accel.techniques.activation_offloading import (
    DEPTHS,
    ActivationOffloading,
    DepthSearch,
    OffloadingOptions,
)
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.gradient_checkpointing import GradientCheckpointing
from support.gpu_sizes import on_gpu
from support.models import TASKS, Task

pytestmark = pytest.mark.numbers

resource = pytest.importorskip("resource")

CPU = torch.device("cpu")
HOST = Host(kind="cpu", device_name="a CPU")


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    """With the thread that copies there are otherwise more than there are cores, and operators wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning-accel-offload")]


def offloading(model: nn.Module, to: str = "host", **settings: Any) -> ActivationOffloading:
    plan = OffloadingOptions(to=to, min_bytes=settings.pop("min_bytes", 1), **settings)  # type: ignore[arg-type]
    return ActivationOffloading(plan, model, CPU)


def engine(model: nn.Module, *techniques: Technique) -> Engine:
    return Engine(model, HOST, techniques)


def trained(model: nn.Module, task: Task, handle: Engine | None, steps: int = 3) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for step in range(steps):
        inputs, targets = task.batch(step)
        with handle.step() if handle else nullcontext():
            loss = task.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("to", ["host", "disk"])
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_run_ends_with_the_very_same_weights(task: Task, to: str) -> None:
    model = task.model()
    technique = offloading(model, to)
    handle = engine(model, technique)
    actual = trained(model, task, handle)
    assert technique.offloader.stats.bytes_in > 0
    handle.undo()
    torch.testing.assert_close(actual, trained(task.model(), task, None), rtol=0, atol=0)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_with_checkpointing_only_what_enters_the_blocks_moves(task: Task) -> None:
    model = task.model()
    moved = {}
    for checkpointed in (False, True):
        technique = offloading(model)
        checkpointing = [GradientCheckpointing("full")] if checkpointed else []
        handle = engine(model, technique, *checkpointing)
        model.load_state_dict(task.model().state_dict())
        actual = trained(model, task, handle)
        moved[checkpointed] = technique.offloader.stats.bytes_out
        handle.undo()
    torch.testing.assert_close(actual, trained(task.model(), task, None), rtol=0, atol=0)
    assert 0 < moved[True] < 0.5 * moved[False]


@pytest.mark.parametrize("stage", ["validate", "test", "predict", "train"])
def test_without_gradients_nothing_moves(stage: str) -> None:
    model = TASKS["cnn"].model()
    technique = offloading(model)
    with torch.no_grad(), technique.step(stage):
        model(TASKS["cnn"].batch()[0])
    assert technique.offloader.stats.tensors_out == 0


def test_validation_with_gradients_is_none_of_its_business() -> None:
    model = TASKS["cnn"].model()
    technique = offloading(model)
    with technique.step("validate"):
        model(TASKS["cnn"].batch()[0]).sum().backward()
    assert technique.offloader.stats.tensors_out == 0


def test_sizes_are_read_as_the_plan_allows_them() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1000), nn.Tanh())
    technique = offloading(model, min_bytes="2KiB")
    with technique.step("train"):
        model(torch.ones(1, 10)).sum()
    assert technique.offloader.stats.bytes_out == 4000
    technique.run.at_end.close()


# -- what it says --------------------------------------------------------------------------------------------------


def test_the_status_says_how_much_moves_and_how_far_ahead() -> None:
    model = TASKS["transformer"].model()
    technique = offloading(model, "disk")
    assert technique.run.status == "disk: waiting for the first step"
    trained(model, TASKS["transformer"], engine(model, technique), steps=1)
    technique.run.at_end.close()
    step_bytes = format_bytes(technique.offloader.stats.bytes_out)
    assert technique.run.status == f"disk: {step_bytes} a step out and back, prefetch depth 2 (being measured)"


def test_the_status_on_a_cpu_says_that_its_memory_is_the_hosts() -> None:
    model = TASKS["transformer"].model()
    technique = offloading(model)
    assert "none is saved: memory.offload='disk' saves it" in technique.run.status


def test_the_status_says_where_every_tensor_is_too_small() -> None:
    model = TASKS["transformer"].model()
    technique = offloading(model, min_bytes="64MiB")
    trained(model, TASKS["transformer"], engine(model, technique), steps=1)
    assert "no saved tensor has 64MiB" in technique.run.status


@pytest.mark.parametrize(("kind", "mend"), [("mps", "gradient_checkpointing"), ("xla", "torch_xla.utils.checkpoint")])
def test_where_it_cannot_work_it_says_why_and_what_can(kind: HostKind, mend: str) -> None:
    model = TASKS["cnn"].model()
    technique = offloading(model)
    assert mend in (technique.unavailable(Host(kind=kind, device_name=kind)) or "")
    assert technique.unavailable(HOST) is None


def test_a_complaint_is_a_warning_of_the_run() -> None:
    model = TASKS["cnn"].model()
    technique = offloading(model)
    handle = engine(model, technique)
    technique.offloader.complaints.append("activation_offloading: something stayed")
    with pytest.warns(AccelWarning, match="something stayed"), handle.step():
        pass
    assert technique.offloader.complaints == []
    handle.undo()


def test_a_full_disk_ends_the_step_and_not_the_run(tmp_path: Path) -> None:
    task = TASKS["cnn"]
    model = task.model()
    technique = offloading(model, "disk", folder=str(tmp_path))
    handle = engine(model, technique)
    before = copy.deepcopy(model.state_dict())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limit[1]))
    try:
        model.eval()  # whose statistics the step that fails would move
        with pytest.raises(OffloadingError, match="Free some space"):
            trained(model, task, handle)
        model.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    actual = trained(model, task, handle)
    handle.undo()
    torch.testing.assert_close(actual, trained(task.model(), task, None), rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == []


# -- how far ahead -------------------------------------------------------------------------------------------------


def test_the_prefetch_depth_is_settled_by_measurement() -> None:
    model = TASKS["cnn"].model()
    technique = offloading(model)
    tried = []
    for step in range(40):
        with technique.step("train"):
            tried.append(technique.offloader.prefetch_depth)
            loss = model(TASKS["cnn"].batch(step)[0]).sum()
        loss.backward()
    assert set(tried) == set(DEPTHS)
    assert len(set(tried[-10:])) == 1
    assert f"prefetch depth {tried[-1]} (measured)" in technique.run.status
    technique.run.at_end.close()


def test_the_smallest_depth_that_is_as_fast_as_any_is_taken() -> None:
    """The steps of depth 1 do ten times the work of the others, which do the same."""
    search = DepthSearch(CPU)
    for _ in range(40):
        search.next_step()
        for _ in range(400_000 if search.depth == 1 else 40_000):
            pass
    assert search.describe().endswith("(measured)")
    assert search.depth != 1


def test_what_lies_between_training_steps_is_not_measured() -> None:
    search = DepthSearch(CPU)
    for _ in range(100):
        search.next_step()
        search.interrupt()  # a validation after every step
    assert search.describe().endswith("(being measured)")


@pytest.mark.usefixtures("determinism_restored")
def test_a_deterministic_run_measures_nothing() -> None:
    torch.use_deterministic_algorithms(True)
    search = DepthSearch(CPU)
    for _ in range(40):
        search.next_step()
        assert search.depth == 2
    assert "a deterministic run goes by no clock" in search.describe()


@pytest.mark.gpu
def test_measuring_never_waits_for_the_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).to(device)
    technique = ActivationOffloading(OffloadingOptions(to="host"), model, device)
    x = torch.randn(on_gpu(4096, simulated=256), 1024, device=device)
    for step in range(40):
        torch.cuda.set_sync_debug_mode("error" if step > 5 else "default")
        try:
            with technique.step("train"):
                loss = model(x).square().mean()
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with technique.step("train"):
        model(x)
    assert "(measured)" in technique.run.status
    technique.run.at_end.close()
