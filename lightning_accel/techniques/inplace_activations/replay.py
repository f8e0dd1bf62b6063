"""A rehearsal: does an activation compute the same in place, bit for bit, on a small piece of its real input?"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_accel.isolation import own_rng

_MAX_SIDE = 16


def differs_in_place(site: nn.Module, x: Tensor) -> str | None:
    """Runs ``site`` on a corner of ``x``, in place and not, forward and backward.

    The user's random numbers, modes and module are left as they were.

    Returns:
        Why the in-place form is no good here; None when it is.
    """
    with_grad = torch.is_grad_enabled() and x.requires_grad
    with _disable_current_modes(), torch.inference_mode(False), torch.set_grad_enabled(with_grad), own_rng(x.device):
        corner = x.detach()[tuple(slice(0, _MAX_SIDE) for _ in x.shape)].clone()
        state = _rng_state(corner)
        outcomes = []
        for inplace in (False, True):
            _set_rng_state(corner, state)
            outcomes.append(_run(site, corner, inplace=inplace))
    (plain, plain_copies), (in_place, copies) = outcomes
    if not torch.equal(plain[0], in_place[0]):
        return "in place it does not compute the same numbers"
    if not all(torch.equal(a, b) for a, b in zip(plain, in_place, strict=True)):
        return "in place its gradient is computed from its rounded result: other numbers (in bfloat16, far off)"
    if copies > plain_copies:
        return "in place PyTorch copies its input for the backward pass: nothing is saved, and the copy takes time"
    return None


def _run(site: nn.Module, corner: Tensor, *, inplace: bool) -> tuple[list[Tensor], int]:
    """The output and the input's gradient, as bytes, and how many tensors beside input and output are kept for it."""
    stand_in = copy.copy(site)
    stand_in.inplace = inplace  # type: ignore[assignment]
    leaf = corner.clone().requires_grad_(torch.is_grad_enabled())
    x = leaf + 0
    known = {x.untyped_storage()._cdata}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = type(site).forward(stand_in, x)
    known.add(y.untyped_storage()._cdata)
    copies = len({tensor.untyped_storage()._cdata for tensor in kept} - known)
    results = [y.detach().clone()]
    if y.requires_grad:
        results += torch.autograd.grad(y, leaf, torch.linspace(0.5, 1.5, y.numel()).to(y).view_as(y))
    return [result.contiguous().view(torch.uint8) for result in results if result.dim()], copies


def _rng_state(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(x.device).get_rng_state(x.device)
    return state


def _set_rng_state(x: Tensor, state: Tensor) -> None:
    if x.device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(x.device).set_rng_state(state, x.device)
