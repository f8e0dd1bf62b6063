"""Whoever holds an activation's input, and whatever goes on around it: who can read it later finds what was there."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from support.techniques.inplace_activations.inplace_harness import Converted, assert_same_training, converted
from support.techniques.inplace_activations.inplace_models import Model, Temporary

pytestmark = pytest.mark.numbers

HELD: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    yield
    HELD.clear()


def holding(x: Tensor, hold: Callable[[Tensor], Any]) -> Tensor:
    HELD.append(hold(x))
    return x


def asked(call: Callable[[nn.Module, Tensor], Any]) -> tuple[int, bool]:
    """Calls ``call(model, h)`` with a model under the technique: calls in place, and whether ``h`` was overwritten."""
    model = Temporary()
    h = torch.linspace(-1, 1, 32).view(4, 8)
    with torch.no_grad(), converted(model) as made:
        call(model, h)
    return made.in_place.get("act", 0), not torch.equal(h, torch.linspace(-1, 1, 32).view(4, 8))


def fresh(hold: Callable[[Tensor], Any] = lambda x: None) -> Tensor:
    return holding(torch.linspace(-1, 1, 32, requires_grad=True) * 1, hold)


# Who holds it


def test_what_nobody_else_holds_is_overwritten() -> None:
    assert asked(lambda model, h: model.act(fresh()))[0] == 1


@pytest.mark.parametrize(
    "hold",
    {
        "itself": lambda x: x,
        "a view": lambda x: x[:3],
        "detached": lambda x: x.detach(),
        "its data": lambda x: x.data,
        "its storage": lambda x: x.untyped_storage(),
        "its typed storage": lambda x: x.storage(),
        "a weak reference": weakref.ref,
        "NumPy": lambda x: x.detach().numpy(),
        "DLPack": lambda x: torch.utils.dlpack.to_dlpack(x.detach()),
        "a closure": lambda x: lambda: x,
        "a partial": lambda x: functools.partial(torch.add, x),
        "a bound method": lambda x: x.sum,
        "a generator": lambda x: (x * i for i in (1, 2)),
        "an iterator": lambda x: iter([x]),
        "a graph that saved it": lambda x: x * x,
        "a graph that saved a view of it": lambda x: x[1:].exp() * x[1:],
        "an exception": lambda x: KeyError(x),
        "a hook": lambda x: x.register_hook(lambda gradient: gradient),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_somebody_holds_is_not(hold: tuple[str, Callable[[Tensor], Any]]) -> None:
    model = Temporary()

    with converted(model) as made:
        model.act(fresh(hold[1]))

    assert (made.in_place, made.as_it_was) == ({}, {"act": 1})


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, torch.exp, torch.relu, torch.sqrt, torch.rsqrt])
def test_a_result_that_its_own_backward_needs_is_not(function: Callable[[Tensor], Tensor]) -> None:
    class Saved(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.act(function(self.a(x).abs() + 0.1)))

    assert assert_same_training(Saved(), torch.randn(4, 8)).in_place == {}


@pytest.mark.parametrize(
    "make",
    {
        "NumPy": lambda: torch.from_numpy(HELD[0]),
        "a buffer": lambda: torch.frombuffer(HELD[0], dtype=torch.float32),
        "DLPack": lambda: torch.from_dlpack(HELD[0]),
        "shared memory": lambda: torch.ones(32).share_memory_(),
        "an attribute": lambda: HELD[1],
    }.items(),
    ids=lambda item: item[0],
)
def test_memory_of_another_make_is_not(make: tuple[str, Callable[[], Tensor]]) -> None:
    HELD[:] = [np.linspace(-1, 1, 32, dtype=np.float32), torch.ones(32)]

    assert asked(lambda model, h: model.act(make[1]()))[0] == 0
    assert HELD[0][0] == -1


def test_a_frame_that_is_held_can_be_asked_for_its_variables() -> None:
    class Framed(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            HELD.append(inspect.currentframe())
            return self.act(h)

    class Caught(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            try:
                raise KeyError
            except KeyError as error:
                HELD.append(error)
            return self.act(h)

    for model in (Framed(), Caught()):
        assert assert_same_training(model, torch.randn(4, 8)).in_place == {}


def test_a_tensor_that_another_thread_holds_is_not() -> None:
    model, ready, done = Temporary(), threading.Event(), threading.Event()
    seen = []

    def read(x: Tensor) -> None:
        ready.set()
        done.wait(30)
        seen.append(x.min().item())

    def handed_over() -> Tensor:
        x = fresh()
        threads.append(threading.Thread(target=read, args=(x,)))
        threads[0].start()
        ready.wait(30)
        return x

    threads: list[threading.Thread] = []
    with converted(model):
        model.act(handed_over())
    done.set()
    threads[0].join()

    assert seen == [-1]


def test_threads_that_share_a_model_each_overwrite_their_own() -> None:
    """The module's ``inplace`` is never switched: another thread's call would see it."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(16, 64)
    expected = model(x)
    wrong = []

    def work(held: Tensor) -> None:
        before = held.clone()
        for _ in range(50):
            kept = model[1](held)
            if not torch.equal(model(x), expected) or not torch.equal(held, before) or (kept < 0).any():
                wrong.append(held)

    with converted(model):
        threads = [threading.Thread(target=work, args=(torch.randn(16, 64),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert wrong == []


# What is going on around


def surrounded(context: Callable[[], Any]) -> Converted:
    class Surrounded(Temporary):
        def forward(self, x: Tensor) -> Tensor:
            with context():
                return super().forward(x)

    return assert_same_training(Surrounded(), torch.randn(4, 8))


@pytest.mark.parametrize(
    "context",
    [
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
        lambda: FlopCounterMode(display=False),
        lambda: torch.device("cpu"),
        forward_ad.dual_level,
    ],
    ids=["offloading", "saved-tensor hooks", "dispatch mode", "function mode", "forward mode"],
)
def test_where_others_count_or_look_on_the_originals_run(context: Callable[[], Any]) -> None:
    assert surrounded(context).in_place == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    assert surrounded(lambda: torch.autocast("cpu", dtype)).in_place == {"act": 3}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_compute_the_same(reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Temporary(), Temporary()])
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
                x = self.act(x)
            return x

    assert assert_same_training(Outer(), torch.randn(4, 8)).in_place["act"] == 6


def test_functional_transforms_get_the_originals() -> None:
    model, x = Temporary(), torch.randn(4, 8)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (row,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    expected = each(parameters, x)
    with converted(model) as made:
        actual = each(parameters, x)

    assert made.in_place == {}
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_without_gradients_a_result_is_no_part_of_the_graph_that_its_input_is_of() -> None:
    class Frozen(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            with torch.no_grad():
                h = self.act(h)
            return self.b(h)

    model = Frozen()
    assert assert_same_training(model, torch.randn(4, 8)).in_place == {}


def test_what_inference_mode_made_is_not_overwritten_outside_it() -> None:
    class Half(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                h = self.a(x)
            h = self.act(h)
            return h.clone()

    assert assert_same_training(Half(), torch.randn(4, 8)).in_place == {}


@pytest.mark.parametrize(
    "make",
    {
        "expanded": lambda x: torch.ones(1).expand(8) * -1 if x is None else x[:, :1].expand(4, 8),
        "every other": lambda x: x[:, ::2],
        "one channel": lambda x: x.view(4, 1, 8).transpose(1, 2)[:, :, :1],
    }.items(),
    ids=lambda item: item[0],
)
def test_a_result_lies_in_memory_as_the_originals(make: tuple[str, Callable[[Any], Tensor]]) -> None:
    """In inference mode views are not marked as such; in place, the result would have their gaps."""
    model = Temporary()

    with torch.inference_mode(), converted(model):
        y = model.act(make[1](torch.randn(4, 8)))

    assert y.stride() == torch.relu(make[1](torch.randn(4, 8))).stride()


def test_gradients_of_gradients_are_the_same() -> None:
    class Penalty(Model):
        def __init__(self) -> None:
            super().__init__()
            self.leaky = nn.LeakyReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.leaky(self.a(self.act(self.b(x)))))
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return y + gradient.norm()

    assert assert_same_training(Penalty(), torch.randn(4, 8)).in_place == {"act": 3, "leaky": 3}


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("when", ["before", "later"])
def test_a_hook_on_the_module_sees_its_input(kind: str, when: str) -> None:
    model = Temporary()
    if when == "before":
        getattr(model.act, kind)(lambda *args: None)

    with converted(model) as made:
        if when == "later":
            getattr(model.act, kind)(lambda *args: None)
        model(torch.randn(4, 8))

    assert made.in_place == {}
    assert ("act" in made.refused) is (when == "before")


def test_hooks_on_all_modules_see_every_input() -> None:
    model = Temporary()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: HELD.append(args))

    with converted(model) as made:
        model(torch.randn(4, 8))
    handle.remove()

    assert made.in_place == {}


def test_replicas_for_data_parallel_compute_the_same() -> None:
    model = Temporary()
    x = torch.randn(4, 8)
    expected = model(x)

    with converted(model) as made:
        replica = model._replicate_for_data_parallel()
        for name, child in model.named_children():
            setattr(replica, name, child._replicate_for_data_parallel())
            for key, parameter in child._parameters.items():
                setattr(getattr(replica, name), key, parameter)
        assert torch.equal(replica(x), expected)

    assert made.in_place == {"act": 1}


def test_an_exception_in_a_step_leaves_what_its_frames_hold_as_it_was() -> None:
    class Failing(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            y = self.act(h)
            raise KeyError(y.shape)

    model = Failing()
    with converted(model), pytest.raises(KeyError) as caught:
        model(torch.randn(4, 8))

    frame = caught.tb[-1].frame if hasattr(caught, "tb") and isinstance(caught.tb, list) else caught.traceback[-1].frame
    assert (frame.f_locals["h"] < 0).any()


def test_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_training(Temporary(), torch.randn(4, 8))
