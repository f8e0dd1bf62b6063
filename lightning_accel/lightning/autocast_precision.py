"""Mixed precision for a Trainer: an ``Autocast`` that is also a Lightning precision plugin."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.core.hidden_warnings import hide_warnings
from lightning_accel.core.patch import AttributePatch, PatchSet
from lightning_accel.lightning.packages import LightningModule, LightningOptimizer, MixedPrecision, Precision, own
from lightning_accel.lightning.private import after_closure
from lightning_accel.techniques.grad_scaler import check_optimizer
from lightning_accel.techniques.mixed_precision import Autocast

# The keys of the scaler's state in checkpoints of Lightning's own precision="16-mixed": now, and before Lightning 1.6.
_SCALER_KEYS = ("MixedPrecision", "native_amp_scaling_state")

_OF_A_PLAIN_STEP = "convert_input", "train_step_context", "pre_backward", "clip_gradients"


class AutocastPrecision(Autocast, Precision):
    """An :class:`Autocast` that a Trainer accepts as its precision plugin."""

    _lightnings: Precision  # of the Trainer's package: another package would not clip the gradients of its modules
    _unscaled: weakref.ref[Tensor] | None = None  # the latest loss that was scaled
    _hidden_warning: Callable[[], None] | None = None  # shows a hidden warning again
    _aside = PatchSet()  # the methods that are left to Lightning's own

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Returns what ``isinstance`` sees: ``MixedPrecision`` during autocasting, otherwise the plugin's type.

        Lightning's helpers (:class:`~lightning.pytorch.callbacks.ThroughputMonitor`) derive the compute dtype from the
        class, and the precision becomes known only after the plugin was made.
        """
        kind: Any = type(self)
        return kind if self.precision == "32-true" else _as_mixed(kind)

    def prepare(self, trainer: Any, device: str) -> None:
        """Prepares a run of ``trainer`` on a device of the type ``device``."""
        self._lightnings = own(trainer, Precision)()
        self._aside = PatchSet()
        self.device = device

    def _use_lightnings_methods(self) -> None:
        """Leaves what a plain step calls to Lightning's own methods: of short steps, ours are a part that counts."""
        if self._aside or self.precision != "32-true":
            return
        for name in _OF_A_PLAIN_STEP:
            if getattr(type(self), name).__module__.startswith("lightning_accel."):  # and no subclass's
                lightnings = types.MethodType(getattr(type(self._lightnings), name), self)
                self._aside.add(AttributePatch(name, "Lightning's own", self, name, lightnings))
        self._aside.apply()

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        self.accept(optimizers)
        if self.is_ours and self._hidden_warning is None:
            # Lightning's model summary, printed next, warns of any mixed precision. The user did not choose this one.
            self._hidden_warning = hide_warnings(f"Precision {self.precision} is not supported by the model summary")
        return super().connect(model, optimizers, lr_schedulers)

    def accept(self, optimizers: Sequence[Optimizer]) -> None:
        """Checks the optimizers of the run and registers them with the gradient scaler."""
        for optimizer in optimizers:
            check_optimizer(optimizer, self.precision)
        if self.scaler is not None:
            self.scaler.watch(optimizers)

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.scaler is not None:
            self._unscaled = weakref.ref(tensor)
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def let_go_of(self, loss: Tensor) -> None:
        """Frees the graph of a scaled loss that gets no backward pass."""
        for one in (loss, None if self._unscaled is None else self._unscaled()):
            if one is not None and one.grad_fn is not None:
                one.detach_()

    def scaled_optimizer_step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs ``closure`` and steps with unscaled gradients, as Lightning's ``MixedPrecision`` does with float16.

        Fused optimizers get unscaled gradients, too, since Lightning's class refuses to clip theirs.
        """
        closure_result = closure()
        # If training_step returned None, there is no new gradient. The scaler must not unscale older gradients again.
        is_skipped = closure_result is None and model.automatic_optimization
        scaler = self.scaler  # None if the step raised and the rest of the run is in float32
        if scaler is not None and not is_skipped:
            scaler.unscale_(optimizer)  # before hooks read gradients, and before clipping
        after_closure(self._lightnings, model, optimizer)
        if scaler is None:
            optimizer.step(**kwargs)
        elif not is_skipped:
            closure_result = scaler.step(optimizer, **kwargs)
            if model.automatic_optimization:
                scaler.finish_step()
        return closure_result

    @override
    def clip_gradients(
        self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if self.scaler is not None and clip_val > 0:
            self.scaler.unscale_(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @contextmanager
    def _scaled_step(self, step: AbstractContextManager[None]) -> Iterator[None]:
        with step:
            yield
        if self.scaler is not None:
            self.scaler.finish_step()  # with manual optimization, all optimizers of this step have stepped by now

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint[_SCALER_KEYS[0]] = self.scaler.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = [state for key in _SCALER_KEYS if (state := checkpoint.get(key))]
        if self.scaler is not None and states:
            self.scaler.load_state_dict(states[0])

    @override
    def teardown(self) -> None:
        self._runs_in_float32 = False
        if self.scaler is not None:
            self.scaler.forget()
        if self._hidden_warning is not None:
            self._hidden_warning()
            self._hidden_warning = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if not isinstance(value, types.MethodType)}
        return {**kept, "_unscaled": None, "_hidden_warning": None, "_runs_in_float32": False, "_aside": PatchSet()}

    @override
    def __reduce__(self) -> Any:
        # By default, pickle refuses an object whose ``__class__`` is not its type.
        return object.__new__, (type(self),), self.__getstate__()


@functools.cache
def _as_mixed(kind: Any) -> Any:
    """Derives a class from ``kind`` and ``MixedPrecision``. It has no instances; ``isinstance`` reads its bases."""

    class Mixed(kind, MixedPrecision):  # type: ignore[misc]
        pass

    return functools.update_wrapper(Mixed, kind, updated=())


@contextmanager
def nested(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    """Enters ``outer``, then ``inner``."""
    with outer, inner:
        yield
