"""Leaves no trace: what a trial runs, and whatever it changes on the way, is hidden from the run and undone."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

_under_trial = ContextVar("_under_trial", default=False)
_dropout_is_off = ContextVar("_dropout_is_off", default=False)


def is_trial() -> bool:
    """Whether this very call is part of a trial, for hooks that watch what the run itself does."""
    return _under_trial.get()


def is_dropout_off() -> bool:
    """Whether this very call is inside :func:`dropout_off`, for kernels that are no functions of torch's."""
    return _dropout_is_off.get()


@contextmanager
def isolated(module: nn.Module, device: torch.device | None = None) -> Iterator[list[str]]:
    """Leaves random streams, buffers, plain attributes and the active dispatch modes as they were found.

    Args:
        module: What runs inside.
        device: Where; by default where its parameters are.

    Yields:
        A list that holds, once the context is left, the names of what was found changed and restored.
    """
    snapshot = Snapshot(module)
    changed: list[str] = []
    with ExitStack() as stack:
        token = _under_trial.set(True)
        stack.callback(_under_trial.reset, token)
        stack.enter_context(own_rng(device or device_of(module)))
        # Someone may be counting FLOPs or watching storages, or (a checkpoint around this module) counting what is
        # saved for backward: a trial is none of their business.
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        # A weight cast here, under no_grad perhaps, must not be what an autocast region of the user's goes on with.
        stack.enter_context(no_cast_cache())
        stack.callback(torch.clear_autocast_cache)
        try:
            yield changed
        finally:
            changed += snapshot.restore()


def _pack(saved: Tensor) -> tuple[Tensor, int]:
    return saved.detach(), saved._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    # Autograd leaves this check to whoever packs: without it a trial would pass where the run then raises.
    saved, version = packed
    if saved._version != version:
        raise RuntimeError("a tensor that its backward pass needs was modified in place")
    return saved


@contextmanager
def no_cast_cache() -> Iterator[None]:
    """Inside, an autocast region that is in force casts every weight anew at each use."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Snapshot:
    """What a forward pass may change besides its result: buffers, attributes, lists and dicts, Python's own `random`.

    Values are compared, not version counters: batch norm's kernels move their statistics behind the counter's back.
    """

    OWN = frozenset(vars(nn.Module())) | {"forward", "track_running_stats"}

    def __init__(self, module: nn.Module) -> None:
        self._modules = dict(module.named_modules())
        self._slots = {n: dict(m._buffers) for n, m in self._modules.items()}
        self._attributes = {n: self._attributes_of(m) for n, m in self._modules.items()}
        tensors = {f"{n}.{name}".lstrip("."): t for n, slots in self._slots.items() for name, t in slots.items()}
        for prefix, attributes in self._attributes.items():
            tensors |= {f"{prefix}.{name}".lstrip("."): value for name, (value, _) in attributes.items()}
        self._tensors = {n: (t, t.detach().clone()) for n, t in tensors.items() if can_be_put_back(t)}
        self._random = {name: get_state() for name, (get_state, _) in random_streams().items()}

    def restore(self) -> list[str]:
        """Puts everything back, and names what had changed."""
        changed = []
        with torch.no_grad():
            for name, (tensor, value) in self._tensors.items():
                if not torch.equal(tensor, value):
                    changed.append(name)
                    tensor.copy_(value)
        for prefix, module in self._modules.items():
            for name in self._restore_attributes(module, self._attributes[prefix]):
                changed.append(f"{prefix}.{name}" if prefix else name)
            # A buffer that the forward pass assigned anew: `self.mean = 0.9 * self.mean + 0.1 * x.mean()`.
            slots = self._slots[prefix]
            replaced = [n for n in {**slots, **module._buffers} if module._buffers.get(n) is not slots.get(n)]
            if replaced:
                changed += [f"{prefix}.{name}" if prefix else name for name in replaced]
                module._buffers.clear()
                module._buffers.update(slots)
        for name, (get_state, set_state) in random_streams().items():
            before = self._random.get(name)
            if before is not None and pickle.dumps(get_state()) != pickle.dumps(before):  # `==` would ask arrays
                set_state(before)
                changed.append(name)
        return changed

    @classmethod
    def _attributes_of(cls, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        return {
            name: (value, copy.copy(value) if isinstance(value, list | dict | set) else None)
            for name, value in vars(module).items()
            if name not in cls.OWN
        }

    @classmethod
    def _restore_attributes(cls, module: nn.Module, before: dict[str, tuple[Any, Any]]) -> Iterator[str]:
        now = vars(module)
        for name in [name for name in now if name not in before and name not in cls.OWN]:
            del now[name]
            yield name
        for name, (value, contents) in before.items():
            if now.get(name) is not value:
                now[name] = value
                yield name
            elif isinstance(value, list | dict | set) and not _same_items(value, contents):
                value.clear()
                value.extend(contents) if isinstance(value, list) else value.update(contents)
                yield name


def can_be_put_back(value: Any) -> bool:
    """Whether ``value`` is a tensor that can be copied, compared and written to, as most buffers can."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return False
    if value.layout != torch.strided or value.is_nested or value.is_meta or value.is_inference():
        return False
    return not any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True))  # expanded


def random_streams(device: torch.device | None = None) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """The random streams that a step may draw from, each as the functions that get and set its state.

    Args:
        device: Whether torch's are among them, that of the host and that of this device; None: they are not.
    """
    streams: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {"random": (random.getstate, random.setstate)}
    if (numpy := sys.modules.get("numpy")) is not None:
        streams["numpy.random"] = (numpy.random.get_state, numpy.random.set_state)
    if device is not None:
        streams["torch"] = (torch.get_rng_state, torch.set_rng_state)
        if device.type == "cuda":
            get_state = functools.partial(torch.cuda.get_rng_state, device)
            streams["torch.cuda"] = (get_state, functools.partial(torch.cuda.set_rng_state, device=device))
    return streams


def _same_items(now: Any, before: Any) -> bool:
    """Whether two containers hold the very same objects; `==` would ask tensors, which answer with tensors."""
    if isinstance(now, dict):
        return list(map(id, now)) == list(map(id, before)) and _same_items([*now.values()], [*before.values()])
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


@contextmanager
def dropout_off(module: nn.Module, *, functions: bool = True) -> Iterator[list[float]]:
    """Switches dropout off, in modules inside ``module`` and wherever a function of torch's is asked for it.

    Args:
        module: The module.
        functions: Whether in functions, too.

    Yields:
        The rates that were switched off.
    """
    rates: list[float] = []
    modes = {m: m.training for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training}
    attentions = {m: m.dropout for m in module.modules() if isinstance(m, nn.MultiheadAttention) and m.dropout > 0}
    for dropout in modes:
        dropout.training = False
        rates.append(dropout.p)
    for attention in attentions:
        attention.dropout = 0.0
    rates += [rate for attention, rate in attentions.items() if attention.training]
    token = _dropout_is_off.set(True)
    try:
        with _NoDropout(rates) if functions else nullcontext():
            yield rates
    finally:
        _dropout_is_off.reset(token)
        for dropout, mode in modes.items():
            dropout.training = mode
        for attention, rate in attentions.items():
            attention.dropout = rate


class _NoDropout(TorchFunctionMode):
    """Has torch's dropout functions, and its attention, drop nothing."""

    _DROPOUTS = frozenset(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
    )

    def __init__(self, rates: list[float]) -> None:
        super().__init__()
        self._rates = rates

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS:
            given = inspect.signature(F.dropout).bind(*args, **kwargs).arguments
            rate, training = given.get("p", 0.5), given.get("training", True)
            if training and rate > 0:
                self._rates.append(rate)
                return given["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = self._without_dropout(args, kwargs)
        return func(*args, **kwargs)

    def _without_dropout(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        at = 4  # of scaled_dot_product_attention(query, key, value, attn_mask, dropout_p)
        rate = args[at] if len(args) > at else kwargs.get("dropout_p", 0.0)
        if rate > 0:
            self._rates.append(rate)
        return (*args[:at], 0.0, *args[at + 1 :]) if len(args) > at else args, (
            kwargs if len(args) > at else kwargs | {"dropout_p": 0.0}
        )


_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called")))


def silent_twin(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy to run in place of ``module``, without hooks, whose runs change nothing of the module's own.

    Parameters are shared unless they are converted; buffers, plain tensors, lists, dicts and sets are copies, and so
    are the modules inside. A forward that was bound to the instance stays behind.

    Args:
        module: Any module.
        dtype: What its floating-point parameters and tensors are converted to; None: what they are.
    """
    return _twin(module, dtype, {})


def _twin(module: nn.Module, dtype: torch.dtype | None, made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        twin: nn.Module = made[id(module)]
        return twin
    if isinstance(module, torch.jit.ScriptModule):
        return copy.deepcopy(module) if dtype is None else copy.deepcopy(module).to(dtype)

    def converted(tensor: Tensor) -> Tensor:
        is_wanted = dtype is not None and tensor.is_floating_point()
        return tensor.detach().to(dtype, copy=True) if is_wanted else tensor.detach().clone()

    def parameter(original: nn.Parameter | None) -> nn.Parameter | None:
        if original is None or dtype is None or not original.is_floating_point():
            return original
        if id(original) not in made:
            made[id(original)] = nn.Parameter(converted(original), original.requires_grad)
        return made[id(original)]  # type: ignore[no-any-return]

    twin = made[id(module)] = copy.copy(module)
    state = vars(twin)
    for name, value in list(state.items()):
        if name in _HOOKS:
            state[name] = type(value)()
        elif isinstance(value, Tensor):
            state[name] = converted(value)
        elif isinstance(value, list | dict | set):
            state[name] = copy.copy(value)
    state.pop("forward", None)
    state["_parameters"] = {name: parameter(value) for name, value in module._parameters.items()}
    state["_buffers"] = {name: None if value is None else converted(value) for name, value in module._buffers.items()}
    state["_modules"] = {
        name: None if part is None else _twin(part, dtype, made) for name, part in module._modules.items()
    }
    return twin


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the CPU without any."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def seed_streams(seed: int, device: torch.device) -> None:
    """Seeds the random streams of the host, and of ``device`` if that is a GPU.

    ``torch.manual_seed`` seeds every device of every kind: those that are not in use yet keep the seed for later, and
    the stack of the call with it, which takes longer than many a trial.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def own_rng(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn inside leaves the random streams of the host, and of ``device`` if that is a GPU, as they were."""
    devices = [device] if device.type in ("cuda", "mps") else []
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
