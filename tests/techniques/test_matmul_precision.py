"""The precision of float32 products: whose choice it is, what is set, and that it is as it was afterwards.

The hosts are simulated where they are not this one: torch's switches are the process's, and are there without a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from lightning_accel.techniques.matmul_precision import in_force
from lightning_accel.tuning.trials import LiveTrials

pytestmark = pytest.mark.numbers

A100 = Host(kind="cuda", device_name="NVIDIA A100", capability=(8, 0), native_bf16=True)
T4 = Host(kind="cuda", device_name="Tesla T4", capability=(7, 5))
AMX_CPU = Host(kind="cpu", device_name="a CPU with AMX", native_bf16=True)
AVX2_CPU = Host(kind="cpu", device_name="a CPU with AVX2")
MI300 = Host(kind="rocm", device_name="AMD Instinct MI300X", arch="gfx942", native_bf16=True)

UNSET = ("none", "none", "none")
HIGH, MEDIUM = ("none", "tf32", "tf32"), ("none", "tf32", "bf16")


@pytest.fixture(autouse=True)
def nobodys_choice() -> Iterator[None]:
    """As in a process in which nobody has set anything, which the older interface cannot restore."""
    before = in_force()
    _set_newer(UNSET)
    yield
    torch.set_float32_matmul_precision("highest")
    _set_newer(before)


def _set_newer(values: tuple[str, str, str]) -> None:
    torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = values[:2]
    torch.backends.mkldnn.matmul.fp32_precision = values[2]


def started(host: Host = AMX_CPU, model: nn.Module | None = None, **settings: Any) -> AcceleratedModel:
    """A plan of this technique, with ``precision="auto"`` unless another is given, on a small model."""
    rest = {"flash_attention": "off", "memory_format": "off", "inplace_activations": "off", "trust": "checked"}
    return accelerate(model or nn.Linear(4, 4), Plan().replace(**{**rest, **settings}), host=host)


def step(handle: AcceleratedModel) -> None:
    with handle.step():
        loss = handle.model(torch.ones(2, 4)).float().sum()
    loss.backward()


class Float32Inside(nn.Module):
    """Computes one product in float32, whatever the run computes in, as rotary embeddings do."""

    def __init__(self, device_type: str = "cpu", enabled: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.device_type, self.enabled = device_type, enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device_type, enabled=self.enabled):
            positions = x.float() @ x.float().T
        return self.linear(x) + positions.sum()


# -- which precision, and on which machine ---------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "expected"), [(AMX_CPU, MEDIUM)])
def test_with_precision_auto_it_is_what_the_machine_has(host: Host, expected: tuple[str, ...]) -> None:
    handle = started(host)
    assert in_force() == UNSET  # the first step is to show whether the model wants float32 somewhere
    step(handle)
    assert in_force() == expected
    handle.undo()
    assert in_force() == UNSET


@pytest.mark.parametrize("value", ["high", "medium"])
def test_a_card_with_tf32_has_both_by_name(value: str) -> None:
    handle = started(A100, precision="32-true", matmul_precision=value)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert "float32 products → TF32" in handle.report.to_text()
    handle.undo()
    assert in_force() == UNSET


@pytest.mark.parametrize(
    ("host", "value", "reason"),
    [
        (T4, "high", "has no TF32"),
        (AVX2_CPU, "medium", "neither AMX nor a fast AVX512-BF16"),
        (AMX_CPU, "high", "precision.matmul='medium'"),
        (MI300, "high", "not measured on rocm"),
    ],
)
def test_what_the_machine_lacks_is_said_with_the_reason(host: Host, value: str, reason: str) -> None:
    with pytest.warns(AccelWarning, match=reason):
        handle = started(host, precision="32-true", matmul_precision=value)
    assert in_force() == UNSET
    handle.undo()


def test_by_default_nobody_is_warned_of_what_the_machine_lacks() -> None:
    handle = started(AVX2_CPU)
    assert "neither AMX nor a fast AVX512-BF16" in handle.report.of("matmul_precision").status
    handle.undo()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_precision_asked_for_by_name_is_not_undermined(precision: str) -> None:
    handle = started(AMX_CPU, precision=precision)
    step(handle)
    assert in_force() == UNSET
    assert f"precision={precision!r} was asked for by name" in handle.report.of("matmul_precision").status
    handle.undo()


# -- what the user has set -------------------------------------------------------------------------------------------


def _older(value: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(value)


def _newer(backend: Any, value: str) -> Callable[[], None]:
    return lambda: setattr(backend, "fp32_precision", value)


@pytest.mark.parametrize(
    "choose",
    [
        _older("highest"),
        _older("high"),
        _newer(torch.backends.cuda.matmul, "ieee"),
        _newer(torch.backends.mkldnn.matmul, "bf16"),
        _newer(torch.backends, "tf32"),
    ],
    ids=["older: highest", "older: high", "newer: cuda", "newer: mkldnn", "newer: everything"],
)
def test_what_the_program_has_set_itself_is_left_alone(choose: Callable[[], None]) -> None:
    choose()
    theirs = in_force()
    handle = started()
    step(handle)
    assert in_force() == theirs
    assert "the program has set" in handle.report.to_text()
    handle.undo()
    assert in_force() == theirs


@pytest.mark.parametrize("choose", [_older("high"), _older("highest"), _newer(torch.backends.cuda.matmul, "tf32")])
def test_after_a_run_that_asked_by_name_it_is_the_users_again(choose: Callable[[], None]) -> None:
    choose()
    theirs = in_force()
    handle = started(matmul_precision="medium")
    assert in_force() == MEDIUM
    handle.undo()
    assert in_force() == theirs


def test_what_is_set_in_mid_run_stays() -> None:
    handle = started(matmul_precision="medium")
    torch.set_float32_matmul_precision("high")
    handle.undo()
    assert in_force() == HIGH


def test_the_older_interface_can_be_read_during_and_after_a_run() -> None:
    """Lightning reads it at every Trainer on a GPU, and it raises where only the newer one was set."""
    handle = started(matmul_precision="medium")
    assert torch.get_float32_matmul_precision() == "medium"
    handle.undo()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_a_program_that_mixed_both_interfaces_has_its_own_mixture_back() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    handle = started(matmul_precision="medium")
    handle.undo()
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    assert in_force() == ("none", "tf32", "none")


# -- what the model wants in float32 ---------------------------------------------------------------------------------


def test_a_model_that_switches_autocast_off_keeps_its_float32() -> None:
    handle = started(model=Float32Inside())
    step(handle)
    step(handle)
    assert in_force() == UNSET
    assert "switches autocast off" in handle.report.to_text()
    handle.undo()


class Float32BySwitch(nn.Linear):
    """The same by torch's switch."""

    def forward(self, x: Tensor) -> Tensor:
        was_on = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", False)
        positions = x.float() @ x.float().T
        torch.set_autocast_enabled("cpu", was_on)
        return super().forward(x) + positions.sum()


def test_nor_does_one_that_does_so_by_the_switch_itself() -> None:
    handle = started(model=Float32BySwitch(4, 4))
    step(handle)
    assert in_force() == UNSET
    assert "switches autocast off" in handle.report.to_text()
    handle.undo()


@pytest.mark.parametrize("model", [Float32Inside(enabled=True), Float32Inside("cuda")], ids=["on", "another device's"])
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda', but CUDA is not available")
def test_other_regions_of_autocast_are_none(model: nn.Module) -> None:
    handle = started(model=model)
    step(handle)
    assert in_force() == MEDIUM
    handle.undo()


def test_by_name_those_are_not_looked_for() -> None:
    handle = started(model=Float32Inside(), matmul_precision="medium")
    step(handle)
    assert in_force() == MEDIUM
    handle.undo()


def test_an_exception_in_the_first_step_leaves_autocast_as_it_was() -> None:
    handle, before = started(), torch.set_autocast_enabled

    def crash() -> None:
        with handle.step():
            assert torch.set_autocast_enabled is not before
            raise KeyError

    with pytest.raises(KeyError):
        crash()
    assert torch.set_autocast_enabled is before
    handle.undo()
    assert in_force() == UNSET


# -- where it holds --------------------------------------------------------------------------------------------------


def test_what_does_not_train_is_in_float32_and_so_is_what_follows_it() -> None:
    """Validation, and metrics at the end of it."""
    handle = started()
    step(handle)
    with torch.no_grad(), handle.step("validate"):
        assert in_force() == UNSET
    assert in_force() == UNSET
    step(handle)
    assert in_force() == MEDIUM  # and its backward pass has it
    handle.undo()
    assert in_force() == UNSET


def test_what_the_user_sets_during_validation_stays() -> None:
    handle = started()
    step(handle)
    with handle.step("validate"):
        torch.set_float32_matmul_precision("high")
    step(handle)
    assert in_force() == HIGH
    handle.undo()
    assert in_force() == HIGH


def test_it_can_be_taken_back_during_validation() -> None:
    handle = started()
    step(handle)
    [arm] = [arm for arm in handle.engine.arms() if arm.name == "matmul_precision"]
    with handle.step("validate"):
        pass
    arm.choose("off")
    step(handle)
    assert in_force() == UNSET
    arm.choose("medium")
    assert in_force() == MEDIUM
    handle.undo()
    assert in_force() == UNSET


def test_asked_for_by_name_it_holds_for_the_whole_run() -> None:
    handle = started(matmul_precision="medium")
    with handle.step("validate"):
        assert in_force() == MEDIUM
    handle.undo()


# -- live trials -----------------------------------------------------------------------------------------------------


def test_it_is_an_arm_whose_off_is_what_torch_had() -> None:
    handle = started()
    step(handle)
    [arm] = [arm for arm in handle.engine.arms() if arm.name == "matmul_precision"]
    assert arm.choices == ("medium",)
    arm.choose("off")
    assert in_force() == UNSET
    arm.choose("medium")
    assert in_force() == MEDIUM
    handle.undo()
    assert in_force() == UNSET


@pytest.mark.parametrize(("seconds", "kept"), [(0.5, MEDIUM), (1.5, UNSET)], ids=["faster", "slower"])
def test_whole_steps_decide(seconds: float, kept: tuple[str, ...]) -> None:
    handle = started()
    step(handle)
    trials = LiveTrials([arm for arm in handle.engine.arms() if arm.name == "matmul_precision"], 400)
    for _ in range(400):
        trials.begin()
        trials.took(seconds if in_force() == MEDIUM else 1.0)
    assert in_force() == kept
    handle.undo()


def test_asked_for_by_name_it_is_not_questioned() -> None:
    handle = started(matmul_precision="medium")
    step(handle)
    assert "matmul_precision" not in [arm.name for arm in handle.engine.arms()]
    handle.undo()


def test_without_compiled_code_every_turn_counts() -> None:
    torch._dynamo.utils.counters.clear()  # as of a new process; the module is there, since any optimizer imports it
    handle = started()
    step(handle)
    assert {arm.settle for arm in handle.engine.arms() if arm.name == "matmul_precision"} == {0}
    handle.undo()


def test_compiled_code_is_compiled_once_for_each_side() -> None:
    """Torch guards it by TF32 on NVIDIA's cards, on machines without one, too."""
    compilations = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    product = torch.compile(lambda x: x @ x, backend=count)
    product(torch.ones(2, 2))
    handle = started()
    step(handle)
    [arm] = [arm for arm in handle.engine.arms() if arm.name == "matmul_precision"]
    for choice in ("off", "medium") * 3:
        arm.choose(choice)
        product(torch.ones(2, 2))
    assert len(compilations) == 2
    assert arm.settle == 1  # and the turn that pays for it is not counted
    handle.undo()
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("value", "off_by"), [("off", 2**-20), pytest.param("high", 2**-9, marks=pytest.mark.needs_kernels("TF32"))]
)
def test_products_on_a_card_are_as_exact_as_that(value: str, off_by: float) -> None:
    """TF32 rounds to 11 bits, float32 to 24; sums of 512 such products are off by the like of one of them."""
    torch.manual_seed(0)
    left, right = (torch.randn(512, 512, device="cuda", dtype=torch.float64) for _ in range(2))
    handle = accelerate(nn.Linear(2, 2).cuda(), Plan(precision={"format": "32-true", "matmul": value}, trust="checked"))
    product = (left.float() @ right.float()).double()
    handle.undo()
    error = float((product - left @ right).norm() / (left @ right).norm())
    assert off_by / 16 < error < off_by if value != "off" else error < off_by


@pytest.mark.gpu
def test_on_a_card_it_is_in_force_by_default_while_the_run_lasts() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("has no TF32")
    handle = accelerate(nn.Linear(4, 4).cuda(), Plan(trust="checked"))
    with handle.step():
        loss = handle.model(torch.ones(2, 4, device="cuda")).float().sum()
    loss.backward()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    handle.undo()
    assert in_force() == UNSET
