"""What breaks when a torch drops one of the private names of its compilers, in plain words: a test a name."""

from __future__ import annotations

import inspect
import logging
import shutil

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.core.torch_private.compilation import (
    compile_with_inductor,
    compiled_alone,
    compiled_call,
    cpp_compilers,
    dynamo_is_loaded,
    dynamo_is_off,
    inductor_options,
    lean_captures,
    outside_of_ddp,
    register_constant,
    set_compiled_call,
)

# Torch's, of itself, when the compiler is imported.
OWN_DEPRECATION = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


def test_what_compiles_is_known_once_something_was() -> None:
    """Else the step whose FLOPs are counted would turn compilation off for the rest of the run."""
    torch.compile(lambda x: x, backend="eager")
    assert dynamo_is_loaded()


def test_a_compilation_of_ours_changes_nothing_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the checks of ``torch.distributions`` are off, and a run that would end with an error trains on with NaN."""
    changes: list[str] = []
    monkeypatch.setattr(torch._dynamo.eval_frame.TorchPatcher, "patch", lambda: changes.append("changed"))
    assert compiled_alone(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
    assert not changes
    torch.compile(lambda x: x, backend="eager")  # the user's own
    assert changes


@pytest.mark.parametrize(("set_up", "warns"), [(logging.NOTSET, False), (logging.INFO, True)])
def test_dynamo_does_not_warn_of_captures_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, set_up: int, warns: bool
) -> None:
    """But for loggers that the user has set up."""
    logger = logging.getLogger("torch._dynamo")
    monkeypatch.setattr(logger, "level", set_up)
    with lean_captures():
        assert logger.getChild("variables").isEnabledFor(logging.WARNING) == warns
    assert logger.level == set_up


def test_it_shows_that_dynamo_was_told_to_capture_nothing() -> None:
    """Else what was captured runs as it was written, and modes, which were taken away for the capture, miss it."""
    assert not dynamo_is_off()
    with torch.compiler.set_stance("force_eager"):
        assert dynamo_is_off()
    with torch._dynamo.config.patch(disable=True):
        assert dynamo_is_off()


def test_inside_a_forward_pass_of_ddp_dynamo_does_not_know_of_it() -> None:
    """Else graphs are cut by DDP's buckets, and attention across a cut is left alone."""
    DistributedDataParallel._active_ddp_module = wrapped = nn.Linear(1, 1)
    try:
        with outside_of_ddp():
            assert DistributedDataParallel._get_active_ddp_module() is None
        assert DistributedDataParallel._get_active_ddp_module() is wrapped
    finally:
        DistributedDataParallel._active_ddp_module = None


def test_a_compiled_module_says_so() -> None:
    """Else a technique would edit a module that runs compiled code, which does not see the edit."""
    module = nn.Linear(2, 2)
    assert compiled_call(module) is None
    module.compile(backend="eager")
    assert compiled_call(module) is not None


def test_a_modules_call_can_be_replaced_and_given_back() -> None:
    """Else blocks of torch's own classes could not be compiled: module.compile() compiles nothing for them."""
    module = nn.Linear(2, 2)
    set_compiled_call(module, lambda x: "compiled")
    assert module(torch.ones(1, 2)) == "compiled"
    set_compiled_call(module, None)
    assert module(torch.ones(1, 2)).shape == (1, 2)


@OWN_DEPRECATION
def test_the_compiler_takes_an_edited_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else blocks are compiled without their fused attention, or not at all."""
    import torch._inductor.compile_fx as inductor

    monkeypatch.setattr(inductor, "compile_fx", lambda graph, inputs, config_patches: (graph, config_patches))
    graph = torch.fx.symbolic_trace(nn.ReLU())
    assert compile_with_inductor(graph, [], {"debug": False}) == (graph, {"debug": False})


@OWN_DEPRECATION
def test_a_mode_of_the_compiler_is_a_set_of_options() -> None:
    """Else ``compile="max-autotune"`` compiles nothing."""
    assert inductor_options("default") == {}
    assert inductor_options("reduce-overhead") == {"triton.cudagraphs": True}


def test_a_class_of_keys_can_be_made_constant_for_dynamo() -> None:
    """Else models of transformers are captured with graph breaks on torch 2.11, and their attention stays slow."""

    class Key(str):
        __slots__ = ()

    register_constant(Key)
    leaves, _ = torch.utils._pytree.tree_flatten([Key("flash")])
    assert leaves == []


def test_inductor_tells_its_compilers() -> None:
    """Else a machine with a C++ compiler would be said to have none, and nothing compiled on it."""
    names = cpp_compilers()
    assert names
    assert all(isinstance(name, str) for name in names)
    assert any(map(shutil.which, names)) is (shutil.which("g++") is not None)


def test_inductor_compiles_exported_programs_ahead_of_time() -> None:
    """Else no model can be exported as ``form="aoti"``. That it works is a slow test of tests/deploy/test_export.py."""
    import torch._inductor as inductor

    given = inspect.signature(inductor.aoti_compile_and_package).parameters
    assert {"package_path", "inductor_configs"} <= set(given)
    assert callable(inductor.aoti_load_package)
