"""Channels_last where it is right and not slower; taken back, with the reason, where it is not."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.assembly import accelerate
from lightning_accel.engine import AccelError, AccelWarning, Engine
from lightning_accel.plan import Plan
from models import TASKS, TinyCNN, ViewCNN, images

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# What is refused everywhere though it was asked for is said as a warning too; tests/test_engine.py holds that.
pytestmark = pytest.mark.filterwarnings("ignore:.* is not in force anywhere")


def laid_out(model: nn.Module, setting: str = "channels_last", **settings: Any) -> Engine:
    quiet: dict[str, Any] = {"precision": "32-true", "inplace_activations": False, "memory_format": setting}
    return accelerate(model, Plan(**{**quiet, **settings}))


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=FORMATS[tensor.dim()]) and not tensor.is_contiguous()


class ConvolutionInputs(TorchDispatchMode):
    """Notes, for every convolution that runs, whether its input is channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "convolution":
            self.layouts.append(is_channels_last(args[0]))
        return func(*args, **(kwargs or {}))


def step(model: nn.Module, handle: Engine | None, inputs: Any, call: Callable[..., Tensor] | None = None) -> Tensor:
    """One training step without an optimizer; the loss."""
    model.zero_grad()
    with handle.step() if handle else nullcontext():
        outputs = (call or model)(handle.batch(inputs) if handle else inputs)
        loss = outputs.square().mean()
    loss.backward()
    return loss.detach()


def assert_same_step(model: nn.Module, handle: Engine, plain: nn.Module, inputs: Any) -> None:
    torch.testing.assert_close(step(model, handle, inputs), step(plain, None, inputs))
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


# -- in force ------------------------------------------------------------------------------------------------------


def test_every_convolution_gets_a_channels_last_input() -> None:
    model = TinyCNN()
    handle = laid_out(model)
    step(model, handle, images(0)[0])
    with ConvolutionInputs() as seen:
        step(model, handle, images(1)[0])
    assert seen.layouts == [True] * 5
    handle.undo()
    with ConvolutionInputs() as seen:
        step(model, None, images(1)[0])
    assert seen.layouts == [False] * 5


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "2d": (lambda: nn.Conv2d(4, 8, 3), (2, 4, 6, 6), True),
    "3d": (lambda: nn.Conv3d(4, 8, 3), (2, 4, 5, 6, 6), True),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 8, 3), (2, 4, 6, 6), True),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 8, 3), (2, 4, 5, 6, 6), True),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 6, 6), True),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 6, 6), False),
    "1x1": (lambda: nn.Conv2d(4, 8, 1), (2, 4, 6, 6), False),
    "1d": (lambda: nn.Conv1d(4, 8, 3), (2, 4, 6), False),
    "circular padding": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), (2, 4, 6, 6), True),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 3)), (2, 4, 6, 6), True),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 8, 3)), (2, 4, 6, 6), True),
    "frozen": (lambda: nn.Conv2d(4, 8, 3).requires_grad_(False), (2, 4, 6, 6), True),
}


@pytest.mark.parametrize(("make", "shape", "changes"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("container", [nn.Sequential, lambda m: _Parts(nn.ModuleList([m])), lambda m: _Parts({"a": m})])
def test_every_kind_of_convolution_computes_the_same_and_is_restored(
    make: Callable[[], nn.Module], shape: tuple[int, ...], changes: bool, container: Callable[..., nn.Module]
) -> None:
    plain = nn.Sequential(container(make()), nn.ReLU())
    head = nn.Conv2d(3, 3, 3)  # so that there is always something to do
    plain.append(_Beside(head))
    model = copy.deepcopy(plain)
    strides = [p.stride() for p in model.parameters()]
    handle = laid_out(model, "auto", verify=False)
    assert any(is_channels_last(p) for p in model[0].parameters() if p.dim() in FORMATS) is changes
    for _ in range(2):
        assert_same_step(model, handle, plain, torch.randn(shape))
    handle.undo()
    assert [p.stride() for p in model.parameters()] == strides


class _Parts(nn.Module):
    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts if isinstance(parts, nn.ModuleList) else nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values() if isinstance(self.parts, nn.ModuleDict) else self.parts:
            x = part(x)
        return x


class _Beside(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x * self.part(torch.ones(1, 3, 4, 4)).mean()


@pytest.mark.parametrize(
    ("setting", "is_2d", "is_3d"),
    [("auto", True, True), ("channels_last", True, False), ("channels_last_3d", False, True)],
)
def test_a_named_format_is_for_its_dimensions_only(setting: str, is_2d: bool, is_3d: bool) -> None:
    model = nn.ModuleDict({"2d": nn.Conv2d(3, 4, 3), "3d": nn.Conv3d(3, 4, 3)})
    handle = laid_out(model, setting, verify=False)
    assert (is_channels_last(model["2d"].weight), is_channels_last(model["3d"].weight)) == (is_2d, is_3d)
    image, volume = handle.batch((torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4, 4)))
    assert (is_channels_last(image), is_channels_last(volume)) == (is_2d, is_3d)
    handle.undo()


def test_preserve_leaves_every_layout_alone() -> None:
    model = TinyCNN()
    handle = laid_out(model, "preserve")
    image = images(0)[0]
    assert handle.batch(image) is image
    assert model.stem.weight.is_contiguous()
    assert handle.report.of("memory_format").status == "off"


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclass
class Sample:
    image: Tensor
    label: Tensor


@pytest.mark.parametrize(
    ("wrap", "image_of"),
    [
        (lambda x, y: x, lambda b: b),
        (lambda x, y: (x, y), lambda b: b[0]),
        (lambda x, y: [[x], {"y": y}], lambda b: b[0][0]),
        (lambda x, y: {"views": {"a": x}, "y": y}, lambda b: b["views"]["a"]),
        (Pair, lambda b: b.image),
        (Sample, lambda b: b.image),
        (lambda x, y: (Sample(x, y), "path.png"), lambda b: b[0].image),
        (lambda x, y: (x[:, :, ::2].repeat(1, 1, 2, 1).transpose(2, 3), y), lambda b: b[0]),
    ],
    ids=["tensor", "tuple", "list", "dict", "namedtuple", "dataclass", "nested", "strided"],
)
def test_images_are_found_wherever_they_sit_in_the_batch(wrap: Any, image_of: Any) -> None:
    model = TinyCNN()
    handle = laid_out(model, verify=False)
    x, y = images(0)
    batch = handle.batch(wrap(x, y))
    assert is_channels_last(image_of(batch))
    assert type(batch) is type(wrap(x, y))
    handle.undo()
    plain = wrap(x, y)
    assert handle.batch(plain) is plain


@pytest.mark.parametrize("batch", ["text", None, 3, ["a", 1], {"a": None}])
def test_a_batch_without_tensors_passes(batch: Any) -> None:
    handle = laid_out(TinyCNN(), verify=False)
    assert handle.batch(batch) == batch
    handle.undo()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("starts_at", [0, 2])
def test_a_run_equals_the_plain_one_with_a_fused_optimizer_too(fused: bool, starts_at: int) -> None:
    """Accelerated from the start or in the middle, when the optimizer's state is contiguous already."""
    plain = TASKS["cnn"].model()
    model = copy.deepcopy(plain)
    nets = [(plain, None), (model, None)]
    # A large eps: Adam makes a full step of a gradient that is nothing but rounding.
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3, fused=fused) for net, _ in nets]
    handle = None
    for index in range(6):
        if index == starts_at:
            handle = laid_out(model)
        if index == 4:
            handle.undo()
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            step(net, handle if net is model and index < 4 else None, images(index)[0])
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)


def test_a_model_without_convolutions_is_no_reason_to_warn_unless_the_format_was_named() -> None:
    handle = laid_out(nn.Linear(2, 2), "auto")
    assert handle.report.of("memory_format").status == "no site in this model"
    handle.undo()
    with pytest.warns(AccelWarning, match="memory_format was asked for and found no site"):
        laid_out(nn.Linear(2, 2), "channels_last").undo()
    with pytest.raises(AccelError, match="strict"):
        laid_out(nn.Linear(2, 2), "channels_last", strict=True)


# -- refused -------------------------------------------------------------------------------------------------------


class Awake(nn.Module):
    """Sleeps when its input is channels_last: a layout that is grossly slower."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if is_channels_last(self.conv.weight):
            time.sleep(0.2)
        return self.conv(x)


class Particular(nn.Module):
    """Computes something else, or nothing, in channels_last."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.raises = raises

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if not x.is_contiguous():
            if self.raises:
                raise RuntimeError("needs contiguous")
            return x.clone(memory_format=torch.preserve_format).as_strided(x.shape, x.contiguous().stride())
        return x


class Repeated(nn.Module):
    """Slower blocks that gradient checkpointing tries as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Awake()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


@pytest.mark.parametrize(
    ("make", "setting", "more", "reason"),
    [
        (Awake, "auto", {}, "x the speed here"),
        (Repeated, "auto", {}, "x the speed here"),
        (Repeated, "auto", {"gradient_checkpointing": {"mode": "full", "blocks": ["Awake"]}}, "x the speed here"),
        (lambda: Particular(raises=False), "channels_last", {}, "other numbers than the original"),
        (lambda: Particular(raises=True), "auto", {}, "failed in its trial: RuntimeError: needs contiguous"),
    ],
    ids=["slower", "slower inside", "slower and checkpointed", "other numbers", "raises"],
)
def test_a_layout_that_does_not_suit_is_taken_back_and_the_first_step_is_the_plain_one(
    make: Callable[[], nn.Module], setting: str, more: dict[str, Any], reason: str
) -> None:
    plain = nn.Sequential(make(), nn.Flatten())
    model = copy.deepcopy(plain)
    handle = laid_out(model, setting, **more)
    for index in range(3):
        inputs = images(index)[0]
        assert torch.equal(step(model, handle, inputs), step(plain, None, inputs))
    (why,) = set(handle.report.refused("memory_format").values())
    assert reason in why
    assert not any(is_channels_last(p) for p in model.parameters() if p.dim() == 4)
    assert handle.batch(inputs) is inputs
    handle.undo()


def test_a_slower_layout_that_was_named_is_kept() -> None:
    model = nn.Sequential(Awake())
    handle = laid_out(model, "channels_last")
    step(model, handle, images(0)[0])
    assert handle.report.applied("memory_format") == ["0.conv"]
    handle.undo()


def test_a_deterministic_run_decides_nothing_by_the_clock(determinism_restored: None) -> None:
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(Awake())
    handle = laid_out(model, "auto")
    step(model, handle, images(0)[0])
    assert handle.report.applied("memory_format") == ["0.conv"]
    handle.undo()


class ViewsLikeAnother(ViewCNN):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return self.head(x.view_as(torch.empty(x.shape[0], 512)))


@pytest.mark.parametrize("kind", [ViewCNN, ViewsLikeAnother])
def test_view_inside_the_model_takes_the_layout_back_and_names_the_line(kind: type[ViewCNN]) -> None:
    plain = kind()
    model = copy.deepcopy(plain)
    handle = laid_out(model)
    for index in range(3):
        assert_same_step(model, handle, plain, images(index)[0])
    (why,) = set(handle.report.refused("memory_format").values())
    line = kind.forward.__code__.co_firstlineno + 2
    assert f"{kind.forward.__code__.co_filename}:{line} calls .view" in why
    assert model.conv.weight.is_contiguous()
    handle.undo()


def test_view_outside_the_model_takes_the_layout_back_and_names_the_line() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    model = copy.deepcopy(plain)
    handle = laid_out(model)

    def flat(net: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: net(x).view(x.shape[0], -1)

    for index in range(2):
        inputs = images(index)[0]
        torch.testing.assert_close(step(model, handle, inputs, flat(model)), step(plain, None, inputs, flat(plain)))
        torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    (why,) = set(handle.report.refused("memory_format").values())
    assert f"{__file__}:" in why
    handle.undo()


def test_view_that_appears_in_validation_only_takes_the_layout_back_then() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    handle = laid_out(model)
    step(model, handle, images(0)[0])
    assert handle.report.applied("memory_format") == ["0"]
    with torch.no_grad(), handle.step("validate"):
        model(handle.batch(images(0)[0])).view(4, -1)
    assert handle.report.applied("memory_format") == []
    handle.undo()


def test_a_view_that_is_wrong_anyway_raises_as_it_would_without_us() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    handle = laid_out(model)
    with pytest.raises(RuntimeError, match="invalid for input"):
        step(model, handle, images(0)[0], lambda x: model(x).view(7, -1))
    handle.undo()


def test_a_weight_tied_between_convolutions_is_restored_when_the_layout_is_taken_back() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))
    model[1].weight = model[0].weight
    handle = laid_out(model)
    step(model, handle, images(0)[0], lambda x: model(x).view(4, -1))
    assert model[0].weight.is_contiguous()
    handle.undo()
    assert model[0].weight.is_contiguous()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))


def compiled() -> nn.Module:
    model = TinyCNN()
    model.compile(backend="eager")
    return model


def in_shared_memory() -> nn.Module:
    return nn.Conv2d(3, 4, 3).share_memory()


def sliced() -> nn.Module:
    model = nn.Conv2d(3, 4, 3)
    model.weight = nn.Parameter(torch.randn(8, 3, 3, 3)[:4])
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lazy, "lazy parameters: run it once before"),
        (compiled, "inside a compiled module"),
        (lambda: nn.Sequential(torch.compile(TinyCNN(), backend="eager")), "inside a compiled module"),
        (in_shared_memory, "shared with other processes"),
        (sliced, "part of a larger buffer"),
    ],
    ids=["lazy", "compiled in place", "compiled wrapper", "shared memory", "sliced"],
)
def test_weights_that_are_not_ours_to_change_are_refused(make: Callable[[], nn.Module], reason: str) -> None:
    handle = laid_out(make(), "auto")
    assert handle.report.applied("memory_format") == []
    assert all(reason in why for why in handle.report.refused("memory_format").values())
    assert handle.report.refused("memory_format")
    handle.undo()


def test_a_convolution_that_never_ran_on_the_first_step_is_taken_back_with_the_reason() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Conv2d(3, 4, 3)})
    handle = laid_out(model)
    step(model, handle, torch.ones(2, 3), model["used"])
    assert "no convolution ran" in handle.report.refused("memory_format")["unused"]
    handle.undo()


# -- the trial -----------------------------------------------------------------------------------------------------


def test_a_first_step_that_raises_is_tried_again_by_the_next() -> None:
    model = nn.Sequential(Awake())
    handle = laid_out(model, "auto")

    def crash(x: Tensor) -> Tensor:
        model(x)
        raise KeyError("user's bug")

    with pytest.raises(KeyError):
        step(model, handle, images(0)[0], crash)
    assert not any("forward" in vars(m) for m in model.modules())
    step(model, handle, images(0)[0])
    assert "x the speed" in handle.report.refused("memory_format")["0.conv"]
    handle.undo()


def test_batch_norm_statistics_move_by_one_step_in_a_step_with_a_trial() -> None:
    plain = TASKS["cnn"].model()
    model = copy.deepcopy(plain)
    handle = laid_out(model, "auto")
    assert_same_step(model, handle, plain, images(0)[0])
    assert int(model.blocks[0].bn1.num_batches_tracked) == 1
    handle.undo()


def test_dropout_draws_what_it_would_have_drawn() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Dropout(0.5))
    model = copy.deepcopy(plain)
    handle = laid_out(model)
    losses = []
    for net, used in ((plain, None), (model, handle)):
        torch.manual_seed(3)
        losses.append(step(net, used, images(0)[0]))
    torch.testing.assert_close(losses[1], losses[0])
    handle.undo()


def test_a_batch_of_one_in_bfloat16_on_a_cpu_is_left_alone() -> None:
    """oneDNN: the kernels for it crash the interpreter as it ends, hence a process of its own."""
    program = (
        "import torch; from torch import nn; from lightning_accel import Plan, accelerate\n"
        "model = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False))\n"
        "handle = accelerate(model, Plan(precision='bf16-mixed'))\n"
        "with handle.step():\n    loss = model(handle.batch(torch.randn(1, 4, 16, 16))).float().sum()\n"
        "loss.backward()\nprint(handle.report.refused('memory_format'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "batches of one sample" in done.stdout
