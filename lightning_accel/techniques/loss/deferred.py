"""Logits that are not there yet: what a head's output is, until somebody reads it or takes its cross-entropy."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import resolve_name
from typing_extensions import Self, override

from lightning_accel.core.report import EditError
from lightning_accel.core.torch_private.autograd import saved_tensors_hooks
from lightning_accel.core.torch_private.tensors import version_of, wrapper_tensor
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.techniques.loss.chunked_loss import LossForm, LossProblem
from lightning_accel.techniques.loss.logit_ops import LogitOp, getters, rearranged

Fuse: TypeAlias = "Callable[[LossProblem], Tensor | str]"


@dataclass(eq=False)
class Family:
    """The output of one call of a head, and what was made of it by views and casts."""

    rows: Tensor  # what the head was given, (…, H)
    weight: Tensor  # the head's at that call, (V, H)
    bias: Tensor | None  # likewise, (V,)
    dtype: torch.dtype  # of the logits
    fuse: Fuse  # gives the loss, or says in words why it is to be computed from the logits
    on_read: Callable[[str], None]  # told that the logits had to be computed, and who reads them
    is_fused: bool = False  # whether a loss was computed without them: in training, the one that is trained on
    is_plain: bool = False  # whether the logits are there
    members: list[weakref.ref[DeferredLogits]] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.rows.device.type
        self.with_gradients = torch.is_grad_enabled()
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._versions = self._count_versions()

    @property
    def living(self) -> list[DeferredLogits]:
        """Those that somebody holds, in the order in which they were made."""
        return [member for ref in self.members if (member := ref()) is not None]

    def read_by(self, who: str) -> None:
        """Computes the logits, once, as the head would have, with all that was made of them and is still held."""
        if self.is_plain:
            return
        self.check()
        self.is_plain = True
        for member in self.living:
            member.compute()
        self.on_read(who)

    def check(self) -> None:
        """Makes sure that the logits would be the ones of the call.

        Raises:
            EditError: A weight, or the head's input, was changed since.
        """
        if self._count_versions() != self._versions:
            raise EditError(
                "loss",
                "The weight or the input of a linear head was changed in place after the head was called, and before"
                " its logits were read; they were left out until then. Read them before the change, or set"
                " techniques.loss='off'.",
            )

    @contextmanager
    def as_at_the_call(self) -> Iterator[None]:
        # What the head saves in a checkpoint belongs to nothing that is computed a second time.
        own = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        gradients, autocast = torch.set_grad_enabled(self.with_gradients), torch.autocast(*self._autocast)
        with gradients, autocast, own if is_checkpointing() else nullcontext():
            yield

    def logits(self, rows: Tensor, weight: Tensor, bias: Tensor | None, class_dim: int, dtype: torch.dtype) -> Tensor:
        """The head's output for ``rows``, with the classes in their place."""
        with torch.autocast(*self._autocast):
            return F.linear(rows.movedim(class_dim, -1), weight, bias).movedim(-1, class_dim).to(dtype)

    def _count_versions(self) -> list[int]:
        tensors = (self.rows, self.weight, *(() if self.bias is None else (self.bias,)))
        return [-1 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def is_checkpointing() -> bool:
    """Whether hooks of others take what is saved: in a checkpoint the second time must save what the first has."""
    hooks = saved_tensors_hooks()
    return torch.is_grad_enabled() and hooks is not None and not hasattr(hooks[0], "gives_way")


class DeferredLogits(Tensor):
    """A tensor without values. Its shape and the like are known, views and casts of it are others of its kind,
    its cross-entropy is computed in pieces; whatever else is done with it, is done with the values, computed then.
    """

    family: Family
    place: LogitOp  # what it would be computed from
    _origin: tuple[DeferredLogits, Callable[..., Any], Sequence[Any], Mapping[str, Any]] | None
    _computed: Tensor | None

    @classmethod
    def of_call(cls, family: Family) -> Self:
        """The output of the call."""
        shape = (*family.rows.shape[:-1], len(family.weight))
        like = torch.empty(shape, dtype=family.dtype, device="meta")
        return cls._made(family, LogitOp(family.rows, like.dim() - 1, like), None)

    @classmethod
    def _made(cls, family: Family, place: LogitOp, origin: Any) -> Self:
        # Part of the graph: what does not ask __torch_function__ (an autograd.Function) still finds the way back.
        made: Self = _Edge.apply(place.rows, family.weight, family.bias, cls, family, place)  # type: ignore[no-untyped-call]
        made.family, made.place, made._origin, made._computed = family, place, origin, None
        family.members.append(weakref.ref(made))
        return made

    def compute(self) -> Tensor:
        """What it would have been."""
        if self._computed is None:
            family = self.family
            with family.as_at_the_call():
                if self._origin is None:
                    self._computed = F.linear(family.rows, family.weight, family.bias)
                else:
                    parent, function, args, kwargs = self._origin
                    self._computed = function(parent.compute(), *args, **kwargs)
        return self._computed

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        who = resolve_name(func) or getattr(func, "__name__", str(func))
        named = dict(kwargs)
        first, *rest = args or (named.pop("input", None),)
        if isinstance(first, DeferredLogits) and not first.family.is_plain:
            found = None
            if func is F.cross_entropy:
                found = first._cross_entropy(*rest, **named)
            elif torch.is_grad_enabled() == first.family.with_gradients:
                found = first._moved(func, rest, named)
            if isinstance(found, Tensor):
                return found
            who = found or who
        for one in tensors_in((args, kwargs)):
            if isinstance(one, DeferredLogits):
                if one.family.is_fused and func in _OF_GRADIENTS:
                    one.family.read_by(who)
                    raise EditError(
                        "loss",
                        f"{who} was called with logits whose loss was computed without them: they have no gradient."
                        " Call it before the loss, or set techniques.loss='off'.",
                    )
                one.family.read_by(who)
        args, kwargs = map_tensors(lambda t: t.compute() if isinstance(t, DeferredLogits) else t, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What came past ``__torch_function__``, below autograd: values alone are wanted."""
        name = func.overloadpacket.__name__
        if name.endswith("_") and not name.endswith("__"):
            raise EditError(
                "loss",
                f"{name} would change logits in place that were left out so far. Read them before, or set"
                " techniques.loss='off'.",
            )

        def values(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DeferredLogits):
                return tensor
            family = tensor.family
            family.check()
            family.on_read(f"{name}, past torch's functions")
            bias = None if family.bias is None else family.bias.detach()
            rows, weight, place = tensor.place.rows.detach(), family.weight.detach(), tensor.place
            return family.logits(rows, weight, bias, place.class_dim, place.like.dtype)

        args, kwargs = map_tensors(values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        place = rearranged(self.place, func, args, kwargs)
        if place is None or place is self.place:
            return None if place is None else self
        # A mask may be written to before the logits are read.
        return self._made(self.family, place, (self, func, *map_tensors(Tensor.clone, (args, kwargs))))

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | str | None:
        """The loss, or why it is to be computed from the logits; None: for torch to say."""
        family, rows, class_dim = self.family, self.place.rows, self.place.class_dim
        of_tokens = rows.shape[:class_dim] + rows.shape[class_dim + 1 :]
        if class_dim != min(1, rows.dim() - 1) or target.shape != of_tokens or target.dtype != torch.int64:
            return None  # probabilities, or a mistake
        if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
            return None
        if type(target) is not Tensor or not 0.0 <= label_smoothing <= 1.0 or target.device != self.device:
            return None
        dtype = _dtype_of_loss(self.dtype, self.device.type)
        if weight is not None and (weight.requires_grad or weight.dtype not in (self.dtype, dtype)):
            return None
        if family.is_fused:
            return "a second loss"
        if is_checkpointing():
            return "a loss that is checkpointed"
        family.check()
        form = LossForm(
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logits_dtype=family.dtype,
            loss_dtype=dtype,
        )
        rows = rows.movedim(class_dim, -1).reshape(-1, rows.shape[class_dim])
        found = family.fuse(LossProblem(rows, family.weight, family.bias, target.reshape(-1), weight, form))
        if isinstance(found, str):
            return found
        # One without gradients, for a log, is no obstacle to the one that is trained on.
        family.is_fused = found.requires_grad or not family.with_gradients
        return found.reshape(target.shape) if reduction == "none" else found


class _Edge(Function):
    """Logits as a part of the graph, for the few that find them there: from their gradient to the head's own."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cls: type[DeferredLogits],
        family: Family,
        place: LogitOp,
    ) -> Tensor:
        # Not by save_for_backward: hooks on saved tensors are for what is really used.
        ctx.given, ctx.check = (rows, weight, bias), family.check
        ctx.logits = functools.partial(family.logits, class_dim=place.class_dim, dtype=place.like.dtype)
        return wrapper_tensor(cls, place.like, rows.device)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise EditError("loss", "Logits that were left out have no second derivative. Set techniques.loss='off'.")
        ctx.check()
        wanted = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            leaves = [
                None if t is None else t.detach().requires_grad_(needed)
                for t, needed in zip(ctx.given, wanted, strict=True)
            ]
            logits = ctx.logits(*leaves)
            needed = [t for t in leaves if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(logits, needed, gradients[0]))
        return (*(next(found) if want else None for want in wanted), None, None, None)


@functools.cache
def _dtype_by_autocast(dtype: torch.dtype, device: str, autocast: torch.dtype | None) -> torch.dtype:
    logits = torch.zeros(1, 2, dtype=dtype, device=device)
    return F.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=device)).dtype


def _dtype_of_loss(dtype: torch.dtype, device: str) -> torch.dtype:
    """Of a cross-entropy of logits of ``dtype``, as autocast has it just now."""
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return _dtype_by_autocast(dtype, device, autocast)


_METADATA = {
    *getters("shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_leaf", "grad_fn", "itemsize"),
    *getters("is_cuda", "is_cpu", "is_mps", "is_meta", "is_xla", "is_xpu", "is_sparse", "is_sparse_csr"),
    *getters("is_nested", "is_quantized", "is_mkldnn", "is_ipu", "is_maia", "is_mtia", "is_vulkan", "output_nr"),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
    *(Tensor.is_contiguous, Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed),
    *(Tensor.get_device, Tensor.__hash__, Tensor.is_inference, *getters("nbytes")),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference),
}
_OF_GRADIENTS = frozenset([torch.autograd.grad, Tensor.register_hook, Tensor.retain_grad])
