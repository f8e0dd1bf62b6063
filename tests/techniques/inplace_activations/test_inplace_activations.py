"""In-place activations: which modules are sites, what a trial refuses, and that everything is left as it was."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from lightning_accel.host import Host
from lightning_accel.patch import PatchSet
from lightning_accel.techniques.base import Refusal
from lightning_accel.techniques.inplace_activations import InplaceActivations, prove_inputs_owned
from techniques.inplace_activations.inplace_harness import CPU, GPU, assert_same, convert, convert_and_compare, run
from techniques.inplace_activations.inplace_models import Model, SameName, Temporary

SAVING = [nn.ReLU, nn.LeakyReLU, nn.RReLU, nn.Dropout]
ROUNDING = [nn.ELU, nn.CELU, nn.SELU]
COPYING = [nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.SiLU, nn.Mish]
CHANNELS = [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d]


def between_linears(act: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8))


# Which modules


@pytest.mark.parametrize("kind", SAVING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_activation_between_linear_layers_works_in_place_and_back(kind: Any, dtype: torch.dtype) -> None:
    model = between_linears(kind()).to(dtype)

    outcome = convert_and_compare(model, torch.randn(4, 8, dtype=dtype))

    assert outcome.applied == {"1"}, outcome.refused
    assert model[1].inplace
    for patch in outcome.patches:
        patch.undo()
    assert not model[1].inplace


@pytest.mark.parametrize("kind", COPYING, ids=lambda kind: kind.__name__)
def test_an_activation_that_copies_its_input_for_backward_is_left_alone_in_training(kind: Any) -> None:
    """PyTorch's in-place form of these first clones the input: no memory is saved, and the clone takes time."""
    outcome = convert_and_compare(between_linears(kind()), torch.randn(4, 8))

    assert "copies its input" in outcome.refused["1"]


@pytest.mark.parametrize("kind", ROUNDING, ids=lambda kind: kind.__name__)
def test_an_activation_whose_gradient_would_round_differently_is_left_alone_in_training(kind: Any) -> None:
    """In place, the backward of the ELU family starts from ``exp(x) - 1``, where small gradients are lost."""
    outcome = convert_and_compare(between_linears(kind()), torch.randn(4, 8))

    assert "rounded result" in outcome.refused["1"]


@pytest.mark.parametrize("kind", [*SAVING, *ROUNDING, *COPYING], ids=lambda kind: kind.__name__)
def test_without_gradients_every_activation_works_in_place(kind: Any) -> None:
    model = between_linears(kind()).eval()
    x = torch.randn(4, 8)
    expected = model(x)

    with torch.no_grad():
        outcome = convert(model, lambda: model(x))

    assert outcome.applied == {"1"}, outcome.refused
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", CHANNELS, ids=lambda kind: kind.__name__)
def test_dropout_of_whole_channels(kind: Any) -> None:
    dims = int(kind.__name__[-2])
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]

    outcome = convert_and_compare(nn.Sequential(conv(3, 4, 1), kind()), torch.randn(2, 3, *[4] * dims))

    assert outcome.applied == {"1"}


def test_what_is_no_site() -> None:
    """Already in place, or with an ``inplace`` that its forward ignores, or without one."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.AlphaDropout(), nn.GELU(), nn.Sigmoid())

    assert prove_inputs_owned(model) == {}


@pytest.mark.parametrize(
    ("act", "setting"),
    [
        (nn.LeakyReLU(-0.1), "negative_slope"),
        (nn.ELU(-1.0), "alpha"),
        (nn.CELU(-1.0), "alpha"),
        (nn.RReLU(-0.2, 0.1), "lower"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_settings_that_forbid_a_backward_in_place(act: nn.Module, setting: str) -> None:
    outcome = convert_and_compare(between_linears(act), torch.randn(4, 8))

    assert setting in outcome.refused["1"]


def test_elementwise_dropout_on_a_gpu_is_left_alone() -> None:
    """There the fused kernel keeps one byte an element; in place, PyTorch keeps a full mask and draws other numbers."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(), nn.Conv2d(4, 4, 1), nn.Dropout2d())

    outcome = convert(model, lambda: run(model, torch.randn(2, 3, 4, 4)), host=GPU)

    assert outcome.applied == {"3"}
    assert "GPU" in outcome.refused["1"]


def test_sites_can_be_skipped_with_a_reason() -> None:
    model = nn.Sequential(between_linears(nn.ReLU()), between_linears(nn.ReLU()))

    outcome = convert(model, lambda: run(model, torch.randn(4, 8)), skip={"0": "inside a checkpointed block"})

    assert outcome.refused == {"0.1": "inside a checkpointed block"}
    assert outcome.applied == {"1.1"}


# What the watched step refuses


def test_a_view_is_refused() -> None:
    """``nn.Linear`` gives one on 3-D input, and autograd would copy the whole of what it is a view of."""
    model = between_linears(nn.ReLU())

    outcome = convert(model, lambda: run(model, torch.randn(2, 3, 8)))

    assert "view" in outcome.refused["1"]


def test_a_site_that_is_not_called_is_refused() -> None:
    model = Temporary()

    outcome = convert(model, lambda: None)

    assert "not called" in outcome.refused["act"]


def test_a_call_from_elsewhere_is_refused() -> None:
    """The training loop itself calls a module of the model: no code of the model shows it."""
    model = Temporary()
    h = model.a(torch.randn(4, 8))

    outcome = convert(model, lambda: model.act(model.a(torch.randn(4, 8))) + h)

    assert "not proven" in outcome.refused["act"]


def test_a_hook_added_after_the_code_was_read_is_seen() -> None:
    model = Temporary()

    outcome = convert(
        model,
        lambda: run(model, torch.randn(4, 8)),
        between=lambda: model.a.register_forward_hook(lambda module, args, output: None),
    )

    assert outcome.refused == {"act": "a forward hook on Linear may keep its input"}


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_hook_on_the_site_is_refused(kind: str) -> None:
    model = Temporary()
    getattr(model.act, kind)(lambda *args: None)

    outcome = convert(model, lambda: run(model, torch.randn(4, 8)))

    assert "hook on it may keep its input" in outcome.refused["act"]


def test_hooks_on_all_modules_are_refused() -> None:
    model = Temporary()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)

    outcome = convert(model, lambda: run(model, torch.randn(4, 8)))
    handle.remove()

    assert "hook on all modules" in outcome.refused["act"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_refused(reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Temporary()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = Outer()

    outcome = convert(model, lambda: run(model, torch.randn(4, 8)))

    assert "checkpointed block" in outcome.refused["block.act"]


def test_other_saved_tensor_hooks_are_refused() -> None:
    class Offloaded(Temporary):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    model = Offloaded()

    outcome = convert(model, lambda: run(model, torch.randn(4, 8)))

    assert "saved-tensor hooks" in outcome.refused["act"]


def test_a_compiled_part_refuses_the_whole_model() -> None:
    """Code that Dynamo first meets under a dispatch mode runs uncompiled for good: the watch must not be entered."""
    model = nn.Sequential(Temporary(), between_linears(nn.ReLU()))
    model[1].compile(backend="eager")

    refused = list(InplaceActivations().patches(model, CPU))

    assert all(isinstance(item, Refusal) and "1 is compiled" in item.reason for item in refused)


def test_a_forward_replaced_on_the_instance_is_refused() -> None:
    model = Temporary()
    model.forward = lambda x: model.act(x) + x  # type: ignore[method-assign]

    assert "plain forward" in str(prove_inputs_owned(model)["act"])


def test_a_forward_without_source_is_refused() -> None:
    namespace: dict[str, Any] = {"Model": Model}
    exec("class Sourceless(Model):\n    def forward(self, x):\n        return self.act(self.a(x))\n", namespace)

    assert "no source" in str(prove_inputs_owned(namespace["Sourceless"]())["act"])


def test_a_forward_wrapped_by_a_decorator_is_refused() -> None:
    assert "decorated" in str(prove_inputs_owned(Wrapped())["act"])


def twice(function: Any) -> Any:
    return lambda self, x: function(self, function(self, x))


def keeping(function: Any) -> Any:
    import functools

    @functools.wraps(function)
    def wrapper(self: Any, x: Tensor) -> Any:
        return function(self, x)

    return wrapper


class Wrapped(Model):
    @keeping
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.a(x))


# What is left behind


def test_the_random_stream_is_untouched_by_the_trial() -> None:
    model = between_linears(nn.Dropout())
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    model(x)
    expected = torch.rand(3)

    torch.manual_seed(3)
    convert(model, lambda: model(x))

    assert torch.equal(torch.rand(3), expected)


def test_the_watched_step_computes_the_same() -> None:
    model, x = SameName(), torch.randn(4, 8)
    expected, seen = run(model, x), []

    convert(model, lambda: seen.extend(run(model, x)))

    assert_same(seen, expected)


def test_an_exception_in_the_step_leaves_no_hook_and_no_mode() -> None:
    model = Temporary()

    def fail() -> None:
        model(torch.randn(4, 8))
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        convert(model, fail)

    assert not model.act._forward_hooks
    assert not model.act._forward_pre_hooks
    assert _get_current_dispatch_mode() is None
    assert not model.act.inplace


def test_without_candidates_no_mode_is_entered() -> None:
    technique = InplaceActivations()
    patches = [p for p in technique.patches(nn.Sequential(nn.ReLU()), CPU) if not isinstance(p, Refusal)]

    with technique.trial(PatchSet(patches)) as verdicts:
        assert _get_current_dispatch_mode() is None

    assert verdicts == {}


def test_the_watch_keeps_no_tensor_alive() -> None:
    model, storages = SameName(), []

    def step() -> None:
        y = model(torch.randn(4, 8))
        storages.append(weakref.ref(y))
        del y
        gc.collect()
        assert storages[0]() is None

    convert(model, step)


def test_manual_optimization_may_run_backward_inside_the_step() -> None:
    """LeakyReLU's backward reads its input: that is no second reader."""
    model = between_linears(nn.LeakyReLU())

    outcome = convert_and_compare(model, torch.randn(4, 8))

    assert outcome.applied == {"1"}


def test_a_deep_copy_of_the_changed_model_works_by_itself() -> None:
    model, x = SameName(), torch.randn(4, 8)
    expected = run(model, x)
    convert(model, lambda: run(model, x))

    assert_same(run(copy.deepcopy(model), x), expected)


def test_state_dict_keys_stay() -> None:
    model = Temporary()
    keys = list(model.state_dict())

    convert(model, lambda: run(model, torch.randn(4, 8)))

    assert list(model.state_dict()) == keys


def test_converting_twice_finds_nothing_new() -> None:
    model = Temporary()
    convert(model, lambda: run(model, torch.randn(4, 8)))

    assert list(InplaceActivations().patches(model, CPU)) == []


def test_reasons_name_the_line() -> None:
    class ReadLater(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            y = self.act(h)
            return y + h

    line = ReadLater.forward.__code__.co_firstlineno + 3

    assert prove_inputs_owned(ReadLater()) == {
        "act": f"its input is needed again: it is read at line {line} of ReadLater.forward"
    }


def test_host_is_only_asked_for_its_kind() -> None:
    (patch,) = InplaceActivations().patches(Temporary(), Host(kind="mps", device_name="a Mac"))

    assert patch.site == "act"
