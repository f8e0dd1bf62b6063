"""Batch norm over the batches of all ranks, also on CPUs, which torch's own does not support."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_accel.core.module_copies import exchanged
from lightning_accel.lightning.packages import TorchSyncBatchNorm, rank_zero_warn

_FORWARDS = (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)  # those of all torch batch norms


class AnyDeviceSyncBatchNorm(TorchSyncBatchNorm):
    """Lightning's ``Trainer(sync_batchnorm=True)``, on every device.

    A batch norm with its own ``forward`` keeps each rank's statistics, and a warning names it: its additions (such as
    an activation) would be lost in another class. The user's own modules are restored afterwards, except under
    ``accel_fsdp``, which leaves a module sharded.
    """

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        return exchanged(model, {part: new for part in model.modules() if (new := _synchronized(part)) is not part})

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        return exchanged(model, {part: new for part in model.modules() if (new := _separated(part)) is not part})


class GlobalBatchNorm(nn.BatchNorm1d):
    """Uses :class:`torch.nn.SyncBatchNorm` on devices that it supports, and computes the same on a CPU.

    A rank's batch counts by its size, and may be empty; a NaN in it makes all ranks' statistics NaN. As with torch's
    own: evaluation exchanges nothing, gradients of parameters are the rank's share of their sum, and every rank must
    run the same layers in the same order. A repeated pass (``torch.utils.checkpoint``) updates the running statistics
    again unless, as in our gradient checkpointing, this is prevented. DDP refuses subclasses of torch's own on a CPU.
    Parameters, buffers, hooks and settings come from the ``plain`` one, of any number of dimensions.
    """

    process_group: dist.ProcessGroup | None

    def __init__(self, plain: nn.Module) -> None:
        super().__init__(0, device="meta")
        self.process_group = None
        vars(self).update(vars(plain))
        self.plain = (plain,)  # in a tuple: as a submodule it would be in the state_dict

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Normalizes an input ``(B, C, ...)`` with the same C and number of dimensions on all ranks.

        Raises:
            ValueError: All ranks together have at most one value per channel. Raised on all ranks.
        """
        if input.device.type != "cpu":
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        if not self.training or not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        mean, var, count = _global_statistics(input.detach(), self.process_group)
        if self.track_running_stats:
            self._track(mean, var, count)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, var, count, self.eps, self.process_group
        )
        return output

    # Torch's own forward calls these too.

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm takes at least 2D input, of shape (B, C, ...), and got {tuple(input.shape)}.")

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        if input.size(1) == 0:
            raise ValueError(f"batch norm takes input with channels, and got {tuple(input.shape)}.")

    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / self.num_batches_tracked.item()
        for running, now in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            if running is not None:
                running.mul_(1 - (factor or 0.0)).add_(now, alpha=factor or 0.0)


class _Normalize(torch.autograd.Function):
    """Normalizes with the statistics of all ranks' batches, and propagates all ranks' gradients through them.

    It uses the kernels for *given* statistics, which treat them as constants. The gradient through the statistics is
    then added: it is a normalization itself, with the sums of the gradients for weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *others: Any
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, var)
        ctx.has_bias = bias is not None
        ctx.count, ctx.eps, ctx.group = others
        weight, bias = (None if given is None else given.to(mean.dtype) for given in (weight, bias))
        return F.batch_norm(input, mean, var, weight, bias, eps=ctx.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, var = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        if input.numel():
            grad_input, grad_scale, grad_shift = torch.ops.aten.native_batch_norm_backward(
                grad_output, input, scale, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        else:  # the kernel divides by the size, so zeros are sent: the other ranks wait for this one
            grad_input, grad_scale, grad_shift = (torch.zeros_like(like) for like in (input, mean, mean))
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_scale, grad_shift]).double()
            dist.all_reduce(sums, group=ctx.group)
            through_scale, through_shift = (-sums * scale * (var.double() + ctx.eps).rsqrt() / ctx.count).to(mean.dtype)
            grad_input += F.batch_norm(input, mean, var, through_scale, through_shift, eps=ctx.eps)
        grad_weight = None if weight is None else grad_scale.to(weight.dtype)
        return grad_input, grad_weight, grad_shift if ctx.has_bias else None, *(None,) * 5


@torch.compiler.disable  # type: ignore[untyped-decorator]  # .item() breaks the graph here anyway, with a warning
def _global_statistics(input: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, int]:
    """Returns mean and biased variance per channel, shape ``(C,)``, and the number of values, over all ranks.

    In float32 at least. Ranks exchange means and variances, not sums of squares, whose difference would lose precision
    under a large mean.
    """
    num_channels = input.size(1)
    dtype = torch.promote_types(input.dtype, torch.float32)
    own = torch.zeros(2 * num_channels + 1, dtype=torch.float64)
    if input.numel():
        # The kernel computes in the dtype of the running statistics; these ones are unused.
        unused = torch.zeros(2, num_channels, dtype=dtype)
        own[:-1] = torch.cat(torch.batch_norm_update_stats(input, unused[0], unused[1], 0.0))
        own[-1] = input.numel() // num_channels
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, own, group=group)
    table = torch.stack(all_ranks)  # an empty batch weighs nothing
    means, variances, counts = table[:, :num_channels], table[:, num_channels:-1], table[:, -1:]
    count = int(counts.sum().item())
    if count < 2:
        raise ValueError(
            f"batch norm in training needs more than one value per channel; all {len(all_ranks)} ranks together have"
            f" {count} (this rank's input is of shape {tuple(input.shape)}). Use larger batches, or drop_last=True."
        )
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean).square())).sum(0) / count
    return mean.to(dtype), var.to(dtype), count


def _synchronized(module: nn.Module) -> nn.Module:
    if isinstance(module, GlobalBatchNorm):
        return module
    if type(module).forward in _FORWARDS and "forward" not in vars(module):
        return GlobalBatchNorm(module)
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm):
        rank_zero_warn(
            f"sync_batchnorm: {type(module).__name__} computes in a forward of its own and keeps the statistics of"
            " each rank's own batch. Use nn.BatchNorm1d, 2d or 3d, and what it adds as a module beside it."
        )
    return module


def _separated(module: nn.Module) -> nn.Module:
    """Returns the original module, with the current running statistics."""
    if not isinstance(module, GlobalBatchNorm):
        return module
    (plain,) = module.plain
    vars(plain).update((name, value) for name, value in vars(module).items() if name in vars(plain))
    return plain
