"""What breaks when a torch drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler_legacy
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from lightning_accel.core import torch_private

# -- memory of tensors -----------------------------------------------------------------------------------------------


def test_handles_on_a_tensor_are_counted() -> None:
    """Else in-place activations say that references could not be counted, and do nothing."""
    tensor = torch.ones(2, requires_grad=True) * 2
    before = torch_private.handles_on_tensor(tensor)
    saved = tensor * tensor

    assert torch_private.handles_on_tensor(tensor) > before
    assert saved.requires_grad


def test_handles_on_memory_are_counted() -> None:
    """As for the tensor."""
    tensor = torch.ones(2)
    before = torch_private.handles_on_storage(tensor.untyped_storage())
    view = tensor[:1]

    assert torch_private.handles_on_storage(tensor.untyped_storage()) == before + 1
    assert view.shape == (1,)


def test_a_tensor_tells_how_often_it_was_written_to() -> None:
    """Else a trial and an offloader would give a backward pass a tensor that was overwritten since."""
    x = torch.zeros(2)
    x.add_(1)
    assert torch_private.version_of(x) == 1
    assert torch_private.version_of(x[:1]) == 1


def test_the_count_of_writes_can_be_set() -> None:
    """Else nothing tells which pieces of a storage change together, and recurrent layers could not be offloaded."""
    x = torch.zeros(2)
    view = x[:1]
    torch_private.set_version(x, 7)
    assert torch_private.version_of(view) == 7


def test_a_tensor_of_a_subclass_can_be_without_memory() -> None:
    """Else ``loss`` raises at the first call of a head, and Lightning's steps are repeated without edits."""

    class Nothing(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("no operation is asked for")

    like = torch.empty(1 << 40, 3, dtype=torch.float16, device="meta").mT
    made = torch_private.wrapper_tensor(Nothing, like, torch.device("cpu"))
    assert type(made) is Nothing
    assert (made.shape, made.stride(), made.dtype, made.device.type) == (like.shape, (1, 3), torch.float16, "cpu")


def test_a_view_tells_what_it_is_a_view_of() -> None:
    """Else views of parameters that FSDP gathers would be offloaded, and fetched back, as if they were activations."""
    weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    assert torch_private.base_of(weight.t()) is weight
    assert torch_private.base_of(torch.zeros(2)) is None


# -- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "register",
    [
        pytest.param(lambda p: p.register_hook(lambda gradient: gradient), id="_backward_hooks"),
        pytest.param(lambda p: p.register_post_accumulate_grad_hook(lambda p: None), id="_post_accumulate_grad_hooks"),
    ],
)
def test_hooks_on_gradients_are_seen(register: Callable[[nn.Parameter], Any]) -> None:
    """Without these two names ``accel_fsdp`` drops a user's hook on a parameter's gradient, and says nothing."""
    parameter = nn.Parameter(torch.ones(2))
    assert not torch_private.has_gradient_hooks(parameter)
    handle = register(parameter)
    assert torch_private.has_gradient_hooks(parameter)
    handle.remove()
    assert not torch_private.has_gradient_hooks(parameter)


def test_hooks_on_saved_tensors_can_be_seen() -> None:
    """Else torch.func would refuse to run wherever activations are offloaded or packed."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    assert torch_private.saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert torch_private.saved_tensors_hooks() == (same, same)


def test_a_result_that_is_about_to_be_saved_is_not_saved_yet() -> None:
    """Else what a ReLU saves could not be kept as one bit an element, half of what sparse activations save."""
    found = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(torch_private.has_saved_result(tensor.grad_fn))
        return tensor.detach()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = x.relu()
        z = y.square()
    assert found == [False, True]  # by the ReLU itself, and by the square after it
    z.sum().backward()
    assert torch_private.has_saved_result(y.grad_fn)  # freed: nothing can be said


def test_of_a_node_that_says_nothing_no_result_is_about_to_be_saved() -> None:
    assert torch_private.has_saved_result(object())


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    """Else the nodes of one block could not be told from those before, and no memory budget could be planned."""
    first = torch.ones(2, requires_grad=True).exp()
    second = first.sin()
    assert torch_private.sequence_number(first.grad_fn) < torch_private.sequence_number(second.grad_fn)


def test_a_backward_pass_can_be_told_from_a_forward_pass() -> None:
    """Else calls that a recomputation makes would be counted as calls of the step."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch_private.is_in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not torch_private.is_in_backward()


def test_execution_engine_calls_back_after_the_last_gradient() -> None:
    """Without it ``accel_ddp`` averages the first step's gradients after code of the user's has changed them."""
    leaf = torch.ones(2, requires_grad=True)
    seen: list[Tensor | None] = []
    loss = (2 * leaf).sum()
    loss.register_hook(lambda _: torch_private.call_after_backward(lambda: seen.append(leaf.grad)))
    loss.backward()
    assert seen == [leaf.grad]
    assert leaf.grad is not None


def test_transforms_and_forward_mode_are_noticed() -> None:
    """Else a model under vmap or grad is changed in the middle of the transform."""
    seen = []
    torch.func.grad(lambda x: seen.append(torch_private.is_transformed()) or x)(torch.tensor(1.0))
    with forward_ad.dual_level():
        seen.append(torch_private.is_transformed())

    assert seen == [True, True]
    assert not torch_private.is_transformed()


# -- modules ---------------------------------------------------------------------------------------------------------


def test_the_eager_call_runs_the_module_with_its_hooks_and_not_what_was_compiled() -> None:
    """Else activations are never done in place, unread attention weights are computed, and compiled blocks recurse."""
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    module.compile(backend="eager")

    assert torch_private.eager_call(module)(torch.ones(2)) is seen[0]
    assert torch_private.eager_call(nn.Module).__code__ is torch_private.eager_call(module).__func__.__code__


@pytest.mark.parametrize(
    ("at", "register"),
    [
        (0, nn.Module.register_forward_hook),
        (1, nn.Module.register_forward_pre_hook),
        (2, nn.Module.register_full_backward_hook),
        (3, nn.Module.register_full_backward_pre_hook),
    ],
)
def test_the_hooks_of_a_module_are_found(at: int, register: Any) -> None:
    """Else a module that somebody watches is changed like any other."""
    module = nn.Linear(2, 2)
    assert not any(torch_private.hooks_of(module))

    def hook(*args: Any) -> None: ...

    register(module, hook)

    assert [list(hooks.values()) for hooks in torch_private.hooks_of(module)] == [
        [hook] if kind == at else [] for kind in range(4)
    ]


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_on_all_modules_are_found(register: Any) -> None:
    """Else whoever watches all modules sees the parts of a captured attention no more."""

    def hook(*args: Any) -> None: ...

    handle = register(hook)
    assert torch_private.hooks_on_all_modules() == [hook]
    handle.remove()
    assert not torch_private.hooks_on_all_modules()


def test_a_module_shows_its_buffers_and_a_change_there_is_a_change_of_the_module() -> None:
    """Else a buffer that a forward pass assigned anew could not be put back after a trial."""
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(2))
    module.register_buffer("absent", None)
    assert torch_private.buffer_slots(module) == {"mean": module.mean, "absent": None}
    torch_private.buffer_slots(module)["mean"] = torch.ones(2)
    assert module.mean.tolist() == [1.0, 1.0]


def test_reset_parameters_has_an_underline_in_attention() -> None:
    """Without it ``accel_fsdp`` refuses models with nn.MultiheadAttention that were made on the meta device."""
    assert torch_private.reset_method(nn.Linear(2, 2)) is not None
    assert torch_private.reset_method(nn.MultiheadAttention(4, 2)) is not None
    assert torch_private.reset_method(nn.ReLU()) is None


@pytest.mark.parametrize(("convolution", "num_dims"), [(nn.Conv2d(1, 1, 1), 4), (nn.Conv3d(1, 1, 1), 5)])
def test_a_convolution_computes_with_the_weight_that_one_method_is_given(convolution: nn.Module, num_dims: int) -> None:
    """Else a layout could not be given up in mid-run where DistributedDataParallel is at work."""
    name = torch_private.convolution_method()
    original = getattr(convolution, name)
    setattr(convolution, name, lambda x, weight, bias: original(x, torch.zeros_like(weight), None))
    assert not convolution(torch.ones([1] * num_dims)).any()


# -- modes that see every operation ----------------------------------------------------------------------------------


class Sees(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeesKernels(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Sees, SeesKernels])
def test_modes_that_see_every_operation_are_noticed(mode: type[Sees | SeesKernels]) -> None:
    """Else Dynamo gives attention under a FLOP counter up for good, and the counter meets overwritten inputs."""
    assert not torch_private.has_modes()
    with mode():
        assert torch_private.has_modes()


def test_a_dispatch_mode_sees_operations_and_nobody_does_without_modes() -> None:
    """Else no FLOPs could be counted; and whoever counts them in a run would count those of its trials."""

    class Seeing(torch_private.DispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Tensor:
            self.operations += 1
            return func(*args, **(kwargs or {}))

    x = torch.zeros(2)
    with Seeing() as seeing:
        with torch_private.without_dispatch_modes():
            x + 1
        assert seeing.operations == 0
        x + 1
        assert seeing.operations == 1


def test_function_modes_step_aside_and_come_back_in_their_order() -> None:
    """Else what is captured inside them is captured anew at every call, or the modes see it no more."""
    ones = torch.ones(2)
    with Sees() as outer, Sees() as inner:
        with torch_private.without_function_modes() as modes:
            assert modes == [outer, inner]
            ones.abs()
        assert not inner.seen
        ones.abs()
    assert len(inner.seen) == len(outer.seen) == 1
    assert not torch_private.has_modes()


# -- compilation -----------------------------------------------------------------------------------------------------


# Torch's, of itself, when the compiler is imported.
OWN_DEPRECATION = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


def test_what_compiles_is_known_once_something_was() -> None:
    """Else the step whose FLOPs are counted would turn compilation off for the rest of the run."""
    torch.compile(lambda x: x, backend="eager")
    assert torch_private.dynamo_is_loaded()


def test_it_shows_that_dynamo_was_told_to_capture_nothing() -> None:
    """Else what was captured runs as it was written, and modes, which were taken away for the capture, miss it."""
    assert not torch_private.dynamo_is_off()
    with torch.compiler.set_stance("force_eager"):
        assert torch_private.dynamo_is_off()
    with torch._dynamo.config.patch(disable=True):
        assert torch_private.dynamo_is_off()


def test_inside_a_forward_pass_of_ddp_dynamo_does_not_know_of_it() -> None:
    """Else graphs are cut by DDP's buckets, and attention across a cut is left alone."""
    DistributedDataParallel._active_ddp_module = wrapped = nn.Linear(1, 1)
    try:
        with torch_private.outside_of_ddp():
            assert DistributedDataParallel._get_active_ddp_module() is None
        assert DistributedDataParallel._get_active_ddp_module() is wrapped
    finally:
        DistributedDataParallel._active_ddp_module = None


def test_a_compiled_module_says_so() -> None:
    """Else a technique would edit a module that runs compiled code, which does not see the edit."""
    module = nn.Linear(2, 2)
    assert torch_private.compiled_call(module) is None
    module.compile(backend="eager")
    assert torch_private.compiled_call(module) is not None


def test_a_modules_call_can_be_replaced_and_given_back() -> None:
    """Else blocks of torch's own classes could not be compiled: module.compile() compiles nothing for them."""
    module = nn.Linear(2, 2)
    torch_private.set_compiled_call(module, lambda x: "compiled")
    assert module(torch.ones(1, 2)) == "compiled"
    torch_private.set_compiled_call(module, None)
    assert module(torch.ones(1, 2)).shape == (1, 2)


@OWN_DEPRECATION
def test_the_compiler_takes_an_edited_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else blocks are compiled without their fused attention, or not at all."""
    import torch._inductor.compile_fx as inductor

    monkeypatch.setattr(inductor, "compile_fx", lambda graph, inputs, config_patches: (graph, config_patches))
    graph = torch.fx.symbolic_trace(nn.ReLU())
    assert torch_private.compile_with_inductor(graph, [], {"debug": False}) == (graph, {"debug": False})


@OWN_DEPRECATION
def test_a_mode_of_the_compiler_is_a_set_of_options() -> None:
    """Else ``compile="max-autotune"`` compiles nothing."""
    assert torch_private.inductor_options("default") == {}
    assert torch_private.inductor_options("reduce-overhead") == {"triton.cudagraphs": True}


def test_a_class_of_keys_can_be_made_constant_for_dynamo() -> None:
    """Else models of transformers are captured with graph breaks on torch 2.11, and their attention stays slow."""

    class Key(str):
        __slots__ = ()

    torch_private.register_constant(Key)
    leaves, _ = torch.utils._pytree.tree_flatten([Key("flash")])
    assert leaves == []


def test_inductor_tells_its_compilers() -> None:
    """Else a machine with a C++ compiler would be said to have none, and nothing compiled on it."""
    names = torch_private.cpp_compilers()
    assert names
    assert all(isinstance(name, str) for name in names)
    assert any(map(shutil.which, names)) is (shutil.which("g++") is not None)


def test_inductor_compiles_exported_programs_ahead_of_time() -> None:
    """Else no model can be exported as ``form="aoti"``. That it works is a slow test of tests/deploy/test_export.py."""
    import torch._inductor as inductor

    given = inspect.signature(inductor.aoti_compile_and_package).parameters
    assert {"package_path", "inductor_configs"} <= set(given)
    assert callable(inductor.aoti_load_package)


# -- training --------------------------------------------------------------------------------------------------------


def test_check_reducer_finalized_names_the_step_that_left_parameters_out(tmp_path: Path) -> None:
    """Without it ``accel_ddp`` fails a step later, after the optimizer has stepped with each rank's own gradients."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        wrapped = DistributedDataParallel(nn.Sequential(*layers))
        wrapped(torch.ones(1, 2)).sum().backward()
        torch_private.check_all_reduced(wrapped)
        wrapped(torch.ones(1, 2))
        layers[0](torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="finished reduction"):
            torch_private.check_all_reduced(wrapped)
    finally:
        torch.distributed.destroy_process_group()


def test_a_gradient_scaler_knows_its_optimizers_until_it_is_updated() -> None:
    """Else float16 training ends at its first step: unscaled gradients could not wait for theirs."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert list(torch_private.optimizer_states(scaler)) == [id(optimizer)]
    assert [list(state["found_inf_per_device"]) for state in torch_private.optimizer_states(scaler).values()] == [
        [torch.device("cpu")]
    ]
    scaler.update()
    assert not torch_private.optimizer_states(scaler)


def test_pytree_numbers_nested_loaders_as_lightning_does() -> None:
    """Without it batches of several loaders are not preprocessed where the user has a hook of their transfer."""
    parts = torch_private.map_parts(
        lambda number, part: (number, part), {"b": [1, [2]], "a": 3}, {"b": ["x", "y"], "a": "z"}
    )
    assert parts == {"b": [(0, 1), (1, [2])], "a": (2, 3)}


def test_a_device_is_held_for_half_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the name no step is held back, and a GPU's idle time is in the other parts of its steps."""
    cycles: list[int] = []
    assert callable(torch.cuda._sleep)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    torch_private.hold_device(1.5)
    torch_private.hold_device(60_000)
    assert cycles == [3_000_000, 1_000_000_000]


def test_loading_samples_is_told_apart_from_making_a_batch_of_them() -> None:
    """Else all of loading is taken to grow with the batch, and larger batches are promised less than they bring."""
    told: list[str] = []

    class Told(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            told.append("sample")
            return index

    def collate(samples: list[int]) -> list[int]:
        told.append("collated")
        return samples

    batches = iter(DataLoader(Told(), batch_size=2, sampler=range(6), collate_fn=collate))
    next(batches)
    with torch_private.told_of_loading(lambda took_ns: told.append("loaded")):
        assert next(batches) == [2, 3]
    next(batches)
    before, during, after = ["sample", "sample", "collated"], ["sample", "sample", "loaded", "collated"], told[7:]
    assert told == [*before, *during, *after]
    assert after == before


# -- profilers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """Those of a profiler that is running, once the test has ended it."""
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        profiler_legacy.profile(profile_memory=True).__enter__()
    yield found
    if not found:
        torch_private.stop_legacy_profiler()


def test_a_profiler_tells_allocations_in_their_order(events: list[Any]) -> None:
    """Else what a block needs on a CPU could not be measured, and no memory budget could be planned there."""
    del [torch.empty(4096, dtype=torch.uint8)][:]
    events += [event for thread in torch_private.stop_legacy_profiler() for event in thread]
    sizes = [event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc"]
    assert sizes == [4096, -4096]


def test_a_profiler_is_seen_before_it_starts() -> None:
    """Else a user's profiler would raise in the steps that are metered for a memory budget."""
    told: list[str] = []
    restore = torch_private.before_profilers(lambda: told.append("one starts"))
    with profile(acc_events=True):  # or torch 2.11 warns that it would not
        assert told == ["one starts"]
    restore()
    with profile(acc_events=True):
        assert told == ["one starts"]


# -- other libraries -------------------------------------------------------------------------------------------------


def test_init_weights_is_how_transformers_models_start() -> None:
    """Without it ``accel_fsdp`` starts such models, made on the meta device, from other weights than they want."""

    class Model(nn.Module):
        def _init_weights(self, module: nn.Module) -> None: ...

    assert torch_private.init_weights_method(Model()) is not None
    assert torch_private.init_weights_method(nn.Linear(2, 2)) is None


def test_what_lightning_asks_of_tpus_is_what_is_asked_here() -> None:
    """Else a machine with TPUs would be taken for one without: this is where Lightning's own code looks."""
    from lightning.fabric.accelerators import xla

    module, _, name = "torch_xla._internal.tpu".rpartition(".")
    assert f"from {module} import {name}" in inspect.getsource(xla)
    with pytest.raises(ImportError):
        torch_private.tpu_library()
