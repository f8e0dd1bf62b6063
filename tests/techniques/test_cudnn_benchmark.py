"""Kernels of convolutions, timed where shapes repeat: when, for whom, and that the switches are as they were.

The card is simulated where there is none: torch's switches are the process's, and are there without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from lightning_accel.techniques.cudnn_benchmark import (
    MANY_SHAPES,
    REPEATED,
    TIMING_S,
    CudnnBenchmark,
    CudnnBenchmarkSetting,
)
from lightning_accel.tuning.trials import LiveTrials
from support.models import TinyCNN

CARD = Host(kind="cuda", device_name="NVIDIA A100", capability=(8, 0), native_bf16=True)
CPU = Host(kind="cpu", device_name="a CPU")
MI300 = Host(kind="rocm", device_name="AMD Instinct MI300X", arch="gfx942", native_bf16=True)

OFF, ON, ON_WITH_OWN_PLANS = (False, False), (True, False), (True, True)


@pytest.fixture(autouse=True)
def switches_as_torch_has_them() -> Iterator[None]:
    before = in_force()
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def in_force() -> tuple[bool, bool]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


def started(
    setting: CudnnBenchmarkSetting = "auto", host: Host = CARD, model: nn.Module | None = None
) -> AcceleratedModel:
    rest = {"precision": "32-true", "flash_attention": "off", "memory_format": "off", "inplace_activations": "off"}
    return accelerate(model or TinyCNN(), Plan().replace(**rest, cudnn_benchmark=setting, trust="unchecked"), host=host)


def seen(handle: AcceleratedModel, *sizes: int) -> list[bool]:
    """Whether the kernels for each of these batches, of so many samples, are timed."""
    timed = []
    for size in sizes:
        handle.batch((torch.zeros(size, 3, 8, 8), torch.zeros(size)))
        timed.append(torch.backends.cudnn.benchmark)
    return timed


def on_trial(handle: AcceleratedModel) -> None:
    """As live trials begin."""
    [arm] = handle.engine.arms()
    arm.choose("off")
    arm.choose("on")


# -- when ------------------------------------------------------------------------------------------------------------


def test_a_shape_is_timed_once_it_has_repeated() -> None:
    handle = started()
    on_trial(handle)
    assert seen(handle, *[4] * (REPEATED + 2)) == [False] * REPEATED + [True, True]
    handle.undo()


def test_shapes_that_keep_changing_are_never_timed() -> None:
    handle = started()
    on_trial(handle)
    assert not any(seen(handle, *range(1, 30)))
    handle.undo()


def test_a_new_shape_among_repeated_ones_runs_as_it_would_have() -> None:
    """The last batch of an epoch, say: to time kernels for it would take longer than it."""
    handle = started()
    on_trial(handle)
    seen(handle, *[4] * 5)
    assert seen(handle, 4, 3, 4) == [True, False, True]
    assert in_force() == ON_WITH_OWN_PLANS
    seen(handle, 3)
    assert in_force() == OFF
    handle.undo()


def test_buckets_of_a_few_shapes_are_timed_each() -> None:
    handle = started()
    on_trial(handle)
    seen(handle, *[4, 6, 8] * REPEATED)
    assert all(seen(handle, 8, 4, 6, 6))
    handle.undo()


def test_a_shape_that_comes_once_in_a_while_is_not_timed_however_often_that_was() -> None:
    """Nine convolutions took nine seconds on an H100."""
    handle = started()
    on_trial(handle)
    timed = [seen(handle, *[4] * 19, 3) for _ in range(20)]
    assert all(every[-2] for every in timed)
    assert not any(every[-1] for every in timed)
    handle.undo()


def test_a_run_too_short_for_trials_times_nothing() -> None:
    handle = started()
    assert not any(seen(handle, *[4] * 100))
    handle.undo()


def test_what_the_timing_takes_is_told_beforehand_and_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = started()
    [arm] = handle.engine.arms()
    assert arm.setup is not None
    assert arm.setup.expected_s() == TIMING_S * 5
    now = itertools.count(10.0, 1.5)
    monkeypatch.setattr("lightning_accel.core.clocks.perf_counter", lambda: next(now))
    arm.setup.begin(5.0)
    assert arm.setup.end() == 1.5
    arm.setup.decline("no time")
    assert handle.engine.technique(CudnnBenchmark).run.status == "no time"
    handle.undo()


def test_shapes_without_end_are_not_all_remembered() -> None:
    handle = started()
    on_trial(handle)
    watched = handle.engine.technique(CudnnBenchmark)
    assert watched is not None
    for size in range(1, MANY_SHAPES + 10):
        handle.batch(torch.zeros(size))
    assert len(watched._seen) < 20
    handle.undo()


def test_by_name_it_is_on_at_once_for_every_shape() -> None:
    handle = started("on")
    assert in_force() == ON
    assert seen(handle, 1, 2, 3) == [True, True, True]
    handle.undo()
    assert in_force() == OFF


# -- for whom --------------------------------------------------------------------------------------------------------


def test_on_a_cpu_it_is_not_to_be_had_and_nobody_is_warned() -> None:
    handle = started(host=CPU)
    assert "cuDNN is NVIDIA's" in handle.report.of("cudnn_benchmark").status
    assert not any(seen(handle, *[4] * (50)))
    handle.undo()


def test_who_asks_for_it_on_a_cpu_is_told() -> None:
    with pytest.warns(AccelWarning, match="cuDNN is NVIDIA's"):
        handle = started("on", host=CPU)
    assert in_force() == OFF
    handle.undo()


def test_amds_cards_have_it_by_name_only() -> None:
    handle = started(host=MI300)
    assert "not measured on AMD's cards" in handle.report.of("cudnn_benchmark").status
    handle.undo()
    handle = started("on", host=MI300)
    assert in_force() == ON
    handle.undo()


def test_a_model_without_convolutions_is_left_alone() -> None:
    handle = started(model=nn.Linear(2, 2))
    assert "no convolutions" in handle.report.to_text()
    assert handle.engine.arms() == []
    handle.undo()


@pytest.mark.parametrize("setting", ["auto", "on"])
def test_a_deterministic_run_never_has_it(setting: CudnnBenchmarkSetting, determinism_restored: None) -> None:
    torch.use_deterministic_algorithms(True)
    if setting == "on":
        with pytest.warns(AccelWarning, match="must not choose kernels by time"):
            handle = started(setting)
    else:
        handle = started(setting)
    assert not any(seen(handle, *[4] * (50)))
    handle.undo()


def test_deterministic_convolutions_alone_are_enough() -> None:
    torch.backends.cudnn.deterministic = True
    handle = started()
    assert "must not choose kernels by time" in handle.report.of("cudnn_benchmark").status
    handle.undo()


def test_what_the_user_has_switched_on_is_not_ours_to_switch() -> None:
    """By ``Trainer(benchmark=True)``, say."""
    torch.backends.cudnn.benchmark = True
    handle = started()
    assert "True already" in handle.report.to_text()
    assert all(seen(handle, 1, 2, 3))
    handle.undo()
    assert in_force() == ON


def test_what_the_user_switches_in_mid_run_stays() -> None:
    handle = started("on")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    handle.undo()
    assert in_force() == (False, True)


def test_each_switch_is_given_back_where_the_user_has_set_the_other() -> None:
    handle = started()
    on_trial(handle)
    seen(handle, *[4] * 5)
    assert in_force() == ON_WITH_OWN_PLANS
    torch.backends.cudnn.benchmark = False
    handle.undo()
    assert in_force() == OFF


def test_an_exception_in_a_step_leaves_nothing_behind_after_undo() -> None:
    handle = started()
    on_trial(handle)
    seen(handle, *[4] * 6)
    with pytest.raises(KeyError), handle.step():
        raise KeyError
    handle.undo()
    assert in_force() == OFF


def test_a_second_run_begins_as_the_first_did() -> None:
    for _ in range(2):
        handle = started()
        on_trial(handle)
        assert seen(handle, *[4] * (REPEATED + 1))[-1]
        handle.undo()
        assert in_force() == OFF


# -- live trials -----------------------------------------------------------------------------------------------------


def test_its_arm_leaves_the_users_own_in_force() -> None:
    handle = started()
    on_trial(handle)
    seen(handle, *[4] * 6)
    [arm] = handle.engine.arms()
    arm.choose("off")
    assert in_force() == OFF
    assert seen(handle, 4, 4) == [False, False]
    arm.choose("on")
    assert seen(handle, 4) == [True]
    assert arm.settle == 1  # the turn in which kernels are timed is not counted
    handle.undo()


@pytest.mark.parametrize(("seconds", "is_kept"), [(0.5, True), (1.5, False)], ids=["faster", "slower"])
def test_whole_steps_decide(seconds: float, is_kept: bool) -> None:
    handle = started()
    trials = LiveTrials(handle.engine.arms(), 600)
    for _ in range(600):
        trials.begin()
        [is_timed] = seen(handle, 4)
        trials.took(seconds if is_timed else 1.0)
    assert trials.tuning.choices == ({"cudnn_benchmark": "on"} if is_kept else {})
    assert seen(handle, 4) == [is_kept]
    handle.undo()


def test_by_name_it_is_not_questioned() -> None:
    handle = started("on")
    assert handle.engine.arms() == []
    handle.undo()


# -- on a card -------------------------------------------------------------------------------------------------------


def _kernels(call: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages())


@pytest.mark.needs_kernels("cuDNN")
@pytest.mark.gpu
def test_a_shape_that_has_run_already_is_timed_all_the_same() -> None:
    """By plans of its own: without them torch would go on with what it has for that shape."""
    model = TinyCNN(channels=32).cuda()
    images, targets = torch.randn(16, 3, 32, 32, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda")
    handle = started(host=Host.detect("cuda"), model=model)

    def step() -> None:
        with handle.step():
            loss = nn.functional.cross_entropy(model(handle.batch(images)), targets)
        loss.backward()

    on_trial(handle)
    for _ in range(REPEATED):
        step()
    with_timing, settled = _kernels(step), _kernels(step)
    assert with_timing > settled
    handle.undo()
