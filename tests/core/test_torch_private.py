"""What breaks when a torch drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.core import torch_private

# -- strategies, resilience, lightning -----------------------------------------------------------------------------


def test_execution_engine_calls_back_after_the_last_gradient() -> None:
    """Without it ``accel_ddp`` averages the first step's gradients after code of the user's has changed them."""
    leaf = torch.ones(2, requires_grad=True)
    seen: list[Tensor | None] = []
    loss = (2 * leaf).sum()
    loss.register_hook(lambda _: torch_private.call_after_backward(lambda: seen.append(leaf.grad)))
    loss.backward()
    assert seen == [leaf.grad]
    assert leaf.grad is not None


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


@pytest.mark.parametrize("has_name", [True, False])
def test_foreach_copy_copies_many_tensors(monkeypatch: pytest.MonkeyPatch, has_name: bool) -> None:
    """Without it every step under the plugin takes longer, in models with many norms."""
    if not has_name:
        monkeypatch.delattr(torch, "_foreach_copy_")
    targets = [torch.zeros(2), torch.zeros(3)]
    torch_private.copy_all(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [target.tolist() for target in targets] == [[1, 1], [2, 2, 2]]
    torch_private.copy_all([], [])


def test_reset_parameters_has_an_underline_in_attention() -> None:
    """Without it ``accel_fsdp`` refuses models with nn.MultiheadAttention that were made on the meta device."""
    assert torch_private.reset_method(nn.Linear(2, 2)) is not None
    assert torch_private.reset_method(nn.MultiheadAttention(4, 2)) is not None
    assert torch_private.reset_method(nn.ReLU()) is None


def test_init_weights_is_how_transformers_models_start() -> None:
    """Without it ``accel_fsdp`` starts such models, made on the meta device, from other weights than they want."""

    class Model(nn.Module):
        def _init_weights(self, module: nn.Module) -> None: ...

    assert torch_private.init_weights_method(Model()) is not None
    assert torch_private.init_weights_method(nn.Linear(2, 2)) is None


def test_pytree_numbers_nested_loaders_as_lightning_does() -> None:
    """Without it batches of several loaders are not preprocessed where the user has a hook of their transfer."""
    parts = torch_private.map_parts(
        lambda number, part: (number, part), {"b": [1, [2]], "a": 3}, {"b": ["x", "y"], "a": "z"}
    )
    assert parts == {"b": [(0, 1), (1, [2])], "a": (2, 3)}
