"""The strategy ``accel_ddp``: a copy of the model in every process, with gradients averaged during backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accel.core.checks import check_choice, check_names
from lightning_accel.core.torch_private.autograd import call_after_backward
from lightning_accel.core.torch_private.training import check_all_reduced
from lightning_accel.lightning.packages import DDPStrategy, own
from lightning_accel.lightning.private import ddp_settings
from lightning_accel.strategies.accelerated import Accelerated
from lightning_accel.strategies.sharding import is_sharded

Compression = Literal["bf16", "fp16"]
_MEND = (
    "A model whose steps use different parameters needs"
    " Trainer(strategy=AccelDDPStrategy(find_unused_parameters=True))."
)
_HOOKS: dict[str, Callable[..., Any]] = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


class AccelDDPStrategy(Accelerated, DDPStrategy):
    """``DistributedDataParallel``, configured from the first step: ``Trainer(strategy="accel_ddp")``.

    The gradients of the first optimizer step are averaged at the end of its backward pass, which works for any model.
    If every parameter got a gradient on every rank, then and in the next pass, the model is wrapped as a static graph:
    its buckets are reduced during the backward pass, without a search. Otherwise each step searches for unused
    parameters. A model that uses all parameters in these steps but not in a later one needs
    ``find_unused_parameters=True``, and an error in that step says so. With manual optimization, each step searches.
    When parameters are frozen or unfrozen, the next step counts as a first step again.

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020),
    https://arxiv.org/abs/2006.15704.

    Args:
        find_unused_parameters: Whether to search for unused parameters. If None, the first step decides.
        static_graph: Whether each step uses the same parameters in the same way. If None, the first step decides.
        gradient_compression: The dtype in which gradients are sent, half as many bytes as float32. If None, their own.
        settings: Those of :class:`~lightning.pytorch.strategies.DDPStrategy`. ``gradient_as_bucket_view`` defaults to
            True: gradients are views of DDP's buckets, since copies would take their size once more.

    Raises:
        ValueError: ``gradient_compression`` is not among those allowed, or given beside a ``ddp_comm_hook``.
    """

    strategy_name = "accel_ddp"
    explanations: ClassVar[Mapping[str, str]] = {**Accelerated.explanations, "Your training graph has changed": _MEND}

    def __init__(
        self,
        *,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_compression: Compression | None = None,
        **settings: Any,
    ) -> None:
        if gradient_compression is not None:
            check_choice("gradient_compression", gradient_compression, get_args(Compression))
            if settings.get("ddp_comm_hook") is not None:
                raise ValueError(
                    f"gradient_compression={gradient_compression!r} and ddp_comm_hook: DDP takes one hook. Wrap yours:"
                    " ddp_comm_wrapper=bf16_compress_wrapper, from torch.distributed.algorithms.ddp_comm_hooks."
                )
        wrappers = own(self, DDPStrategy), DistributedDataParallel
        known = {name for kind in wrappers for name in inspect.signature(kind.__init__).parameters}
        check_names(settings, allowed=sorted(known - {"self", "kwargs", "module"}), owner="AccelDDPStrategy")
        settings.setdefault("gradient_as_bucket_view", True)
        super().__init__(**settings)
        self._syncs_first = settings.get("init_sync", True)
        self.timeout = settings.get("timeout")
        self._find_unused_parameters = find_unused_parameters
        self._static_graph = static_graph
        self._compression = gradient_compression
        self._parameters: list[nn.Parameter] = []
        self._ignored: set[str] = set()  # names of parameters that DDP does not synchronise
        self._wrapped_for: list[bool] = []  # the result of `_trained` when the model was wrapped
        self._is_observing = False
        self._is_accumulating = False
        self._is_first_static_pass = False
        self._is_static: bool | None = None  # the result of the observed step, until the model is wrapped for it

    @override
    def configure_ddp(self) -> None:
        module = self.module
        find, static = self._find_unused_parameters, self._static_graph
        is_automatic = module.automatic_optimization
        if is_sharded(module):
            raise ValueError(
                f"An earlier run of accel_fsdp left {type(module).__name__} sharded, which accel_ddp cannot wrap. Make"
                " a new one, and load that run's checkpoint: trainer.fit(..., ckpt_path=...)."
            )
        self._is_observing = find is None and static is None and is_automatic
        self._is_static = None
        self._parameters = list(module.parameters())
        self._wrapped_for = self._trained()
        # Wrapped even if the first step runs without the wrapper: wrapping checks that the ranks have the same
        # parameters, and copies the values of rank 0. Given settings hold. Others follow from these, or, with manual
        # optimization, are those that always work.
        always_find = find is None and not static and not is_automatic
        self._wrap(find=bool(find) or always_find, static=bool(static), init_sync=self._syncs_first)
        if self._is_observing:
            self.model = module

    def _wrap(self, *, find: bool, static: bool, init_sync: bool) -> None:
        self._is_first_static_pass = static
        ddp_settings(self).update(find_unused_parameters=find, static_graph=static, init_sync=init_sync)
        self.model = self.module
        super().configure_ddp()
        wrapped = cast(DistributedDataParallel, self.model)
        self._ignored = wrapped.parameters_to_ignore
        if self._compression is None:
            return
        try:
            wrapped.register_comm_hook(None, _HOOKS[self._compression])
        except TypeError as error:
            raise ValueError(
                f"gradient_compression={self._compression!r} cannot be done here: {error}. Use 'fp16', or None."
            ) from error

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._trained() != self._wrapped_for:
            self.configure_ddp()
        elif self._is_static is not None:
            self._wrap_as_observed(self._is_static)
        return super().training_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._is_accumulating = True
        try:
            # The first pass of a static graph must be reduced, since torch records it there and otherwise fails. A
            # second average of the same gradients does not change them.
            with nullcontext() if self._is_first_static_pass else super().block_backward_sync():
                yield
        finally:
            self._is_accumulating = False

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._is_observing and not self._is_accumulating and closure_loss.requires_grad:
            # As in DDP, hooks after the backward pass, such as gradient clipping, must see the average.
            closure_loss.register_hook(lambda _: call_after_backward(self._average))  # type: ignore[no-untyped-call]

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        is_recorded, self._is_first_static_pass = self._is_first_static_pass, False
        if self._is_observing and not self._is_accumulating:
            if self._is_static is None:  # the user's own backward call started from another tensor
                self._average()
        elif is_recorded and self._static_graph is None:
            # Torch has recorded the parameters that this pass used, and would fail if a later pass uses more.
            if not _all_have(_ranks_with_gradients(self._reduced_parameters())):
                self._is_static = False
        elif self.module.automatic_optimization and not self._is_accumulating:
            self._check_all_were_used()

    def _average(self) -> None:
        self._is_static = average_gradients(self._reduced_parameters())

    def _trained(self) -> list[bool]:
        return [self.module.automatic_optimization, *(parameter.requires_grad for parameter in self._parameters)]

    def _wrap_as_observed(self, is_static: bool) -> None:
        self._is_observing, self._is_static = False, None
        self.note(
            "accel_ddp: every parameter got a gradient: static graph"
            if is_static
            else "accel_ddp: not every parameter got a gradient on every rank: unused ones are looked for in each step"
        )
        # The ranks have trained together, so their parameters are the same.
        self._wrap(find=not is_static, static=is_static, init_sync=False)

    def _reduced_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.module.named_parameters() if p.requires_grad and name not in self._ignored]

    def _check_all_were_used(self) -> None:
        try:
            check_all_reduced(cast(DistributedDataParallel, self.model))
        except RuntimeError as error:
            unused = [n for n, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
            raise RuntimeError(
                f"Parameters that earlier steps used got no gradient in this one: {', '.join(unused[:4]) or 'unknown'}."
                f" Their gradients cannot be averaged over the ranks. {_MEND}"
            ) from error


def average_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    """Averages gradients over the ranks; returns whether every parameter had one on every rank. A collective call.

    The parameters and their order are the same on every rank. A gradient that only other ranks have counts as zero.

    Raises:
        ValueError: A gradient is sparse on some ranks only. Raised on every rank.
    """
    world_size = torch.distributed.get_world_size()
    users = _ranks_with_gradients(parameters)
    for parameter, (count, sparse) in zip(parameters, users, strict=True):
        if count == 0:
            continue
        if 0 < sparse < world_size:
            raise ValueError(
                f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient on {sparse} of {world_size}"
                " ranks: DDP reduces those of all or none. Set sparse=False in its embedding."
            )
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad if parameter.grad.is_sparse else parameter.grad.contiguous()
        torch.distributed.all_reduce(gradient)
        gradient /= world_size
        if gradient is not parameter.grad:
            parameter.grad.copy_(gradient)
    return _all_have(users)


def _all_have(users: Sequence[tuple[int, int]]) -> bool:
    return all(count == torch.distributed.get_world_size() for count, _ in users)


def _ranks_with_gradients(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Counts for each parameter the ranks with a gradient and those with a sparse one. A collective call."""
    if not parameters:
        return []
    own = [(p.grad is not None, p.grad is not None and p.grad.is_sparse) for p in parameters]
    users = torch.tensor(own, dtype=torch.int32, device=parameters[0].device)
    torch.distributed.all_reduce(users)
    counts: list[tuple[int, int]] = users.tolist()
    return counts
