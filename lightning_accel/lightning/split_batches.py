"""The split layer: sends a batch in parts through ``training_step`` and its backward pass, within one step.

The weight of a part is its share of the samples. So if the loss is a mean over samples and no layer uses batch
statistics, the gradients add up to those of the whole batch. Lightning sees one step. Its loss has the value for the
whole batch and the graph of the last part. The other parts' gradients exist before the backward pass of that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger
from lightning_accel.core.samples import count_samples, split_samples
from lightning_accel.core.torch_private.autograd import has_gradient_hooks
from lightning_accel.core.tree import map_tensors
from lightning_accel.lightning.packages import ParallelStrategy, Trainer, callbacks_of, is_overridden
from lightning_accel.lightning.private import logged_results
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.step_snapshot import begins_gradients
from lightning_accel.step.layers import Call, Layer

NAME = "out_of_memory"
"""The name of its record in the report."""


class SplitBatches(Layer):
    """Splits the training batches of one run, once :meth:`halve` or :meth:`begin` was called.

    Attributes:
        most: The largest number of samples in a part; None if batches are not split.
    """

    name = "split"

    def __init__(self, engine: RunEngine) -> None:
        self._module, self._report, self._precision = engine.module, engine.report, engine.precision
        super().__init__([(self._module.trainer.strategy, ("training_step",)), (self._precision, ("backward",))])
        self.most: int | None = None
        self._former: int | None = None
        self._given_up = ""
        self._earlier: list[tuple[Tensor, Tensor]] = []  # parameters, and the gradients of all parts but the last

    def __str__(self) -> str:
        return "batches are whole" if self.most is None else f"batches in parts of at most {self.most} samples"

    # -- the size of the parts -----------------------------------------------------------------------------------

    def begin(self, most: int) -> None:
        """Splits batches from now on, as the run did before its checkpoint."""
        why = self._why_never()
        if why:
            self._refuse(why)
        else:
            self._set_limit(most)

    def halve(self, batch: Any) -> str:
        """Halves the largest part, which was too large.

        Returns:
            The reason why this is impossible; empty if it is done.
        """
        why = self._why_never()
        try:
            size = count_samples(batch)
            largest = min(size, self.most or size)
            if largest < 2:
                raise ValueError("a single sample at a time is the least")
            half = -(-largest // 2)
            split_samples(batch, half)
        except ValueError as error:
            why = why or f"the batch cannot be split: {error}"
        if why:
            self._refuse(why)
            return why
        self._former = self.most
        self._set_limit(half)
        return ""

    def give_up(self, why: str) -> None:
        """Undoes the latest halving, and never halves again."""
        self._given_up = f"in parts of {self.most} samples {why}"
        self._set_limit(self._former)
        self._refuse(self._given_up)

    def _why_never(self) -> str:
        if self._given_up:
            return self._given_up
        if not self._module.automatic_optimization:
            return "with manual optimization it is the module that goes backward, and that can split its batch"
        if isinstance(self._module.trainer.strategy, ParallelStrategy):
            return f"batches are not split under {type(self._module.trainer.strategy).__name__}"
        hooked = [name for name, one in self._module.named_parameters() if has_gradient_hooks(one)]
        return f"hooks on the gradient of {hooked[0]!r} would be called for every part" if hooked else ""

    def _set_limit(self, most: int | None) -> None:
        self.most = most
        record = self._report.of(NAME)
        record.is_on, record.status = most is not None, str(self)

    def _refuse(self, why: str) -> None:
        self._report.note(f"memory.on_oom='split': {why}")

    # -- a step --------------------------------------------------------------------------------------------------

    def around_backward(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        # The backward pass begins with the last part. The gradients of the earlier parts must exist by then.
        earlier, self._earlier = self._earlier, []
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return call(*args, **kwargs)

    def around_training_step(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        self._earlier = []
        parts: Sequence[tuple[Any, int]] = ()
        if self.most is not None:
            try:
                parts = split_samples(args[0], self.most)
            except ValueError as error:
                self._refuse(f"a batch went through its step whole: {error}")
        return call(*args, **kwargs) if len(parts) < 2 else self._in_parts(call, parts, args[1:], kwargs)

    def _in_parts(self, step: Callable[..., Any], parts: Sequence[tuple[Any, int]], others: Any, kwargs: Any) -> Any:
        trainer = self._module.trainer
        size = sum(length for _, length in parts)
        earlier: Tensor | None = None  # the loss of the earlier parts
        extras: list[dict[str, Any]] = []
        with self._earlier_gradients_aside(), _SplitLogs(trainer) as logs:
            for index, (part, length) in enumerate(parts, start=1):
                logs.begin_part(part, length / size)
                outputs = step(part, *others, **kwargs)
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
                extras += [map_tensors(Tensor.detach, dict(outputs))] if isinstance(outputs, Mapping) else []
                # None skips this part. Lightning itself reports values of other types.
                loss = loss * (length / size) if isinstance(loss, Tensor) else None
                if loss is not None and index < len(parts):
                    self._module.backward(self._precision.scaled(loss / trainer.accumulate_grad_batches))
                    earlier = loss.detach() if earlier is None else earlier + loss.detach()
        if earlier is not None:  # the loss needs a graph even if the last part has none
            loss = earlier.requires_grad_() if loss is None else loss + earlier
        if loss is None:
            return outputs
        return {**_joined(extras, [length for _, length in parts]), "loss": loss} if extras else loss

    @contextmanager
    def _earlier_gradients_aside(self) -> Iterator[None]:
        """Collects the gradients of earlier parts elsewhere, as Lightning zeroes all gradients after ``training_step``.

        So a part that raises has changed no gradient. If no code can see the old gradients before they are zeroed,
        their memory is freed now.
        """
        module, optimizers = self._module, self._module.trainer.optimizers
        optimized = {p: None for one in optimizers for group in one.param_groups for p in group["params"]}
        unread = optimized if all(map(self._zeroes_unseen, optimizers)) else {}
        parameters = list({p: None for p in module.parameters() if p.requires_grad} | optimized)
        before = [None if parameter in unread else parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            self._earlier = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _zeroes_unseen(self, optimizer: Optimizer) -> bool:
        """Returns whether the present gradients are dropped after ``training_step`` and no code reads them before."""
        trainer, hook = self._module.trainer, "on_before_zero_grad"
        return (
            begins_gradients(trainer)
            and type(optimizer).zero_grad is Optimizer.zero_grad
            and not any(is_overridden(name, self._module) for name in (hook, "optimizer_zero_grad"))
            and not any(
                is_overridden(hook, one) for one in callbacks_of(trainer) if not isinstance(one, SpeedMemoryLogger)
            )
        )


def _joined(outputs: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Joins the outputs of all parts: tensors with a row for each sample. All others are those of the last part."""
    joined = dict(outputs[-1])
    for name in joined:
        values = [one.get(name) for one in outputs]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) == len(sizes) and [len(one) if one.dim() else -1 for one in tensors] == list(sizes):
            joined[name] = torch.cat(tensors)
    return joined


class _SplitLogs(Layer):
    """A layer around the parts of one step that makes the step's and the epoch's means weigh samples, not parts."""

    name = "split"

    def __init__(self, trainer: Trainer) -> None:
        self._results: Any = logged_results(trainer)
        super().__init__([] if self._results is None else [(self._results, ("update_metrics",))])
        self._share = 1.0
        self._values: dict[str, tuple[Tensor, float]] = {}  # weighted sum and sum of weights of the step so far
        self._part: dict[str, Tensor] = {}  # values of the current part

    def __enter__(self) -> Self:
        if self._results is not None:
            self._shown = self._results.batch, self._results.batch_size
            self.apply()
        return self

    def begin_part(self, part: Any, share: float) -> None:
        """Weights the values logged next by this part's share of the samples."""
        self._end_part()
        self._share = share
        if self._results is not None:
            self._results.batch, self._results.batch_size = part, None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._results is None:
            return
        self._end_part()
        self.undo()
        self._results.batch, self._results.batch_size = self._shown
        if kind is None:
            for key, (total, weight) in self._values.items():
                # A batch size of 0 sets the step's value and leaves the epoch's unchanged.
                self._results.update_metrics(key, total / weight, 0)

    def around_update_metrics(self, call: Call, key: str, value: Any, batch_size: int) -> None:
        call(key, value, batch_size)
        metric = self._results[key]
        if metric.is_tensor and metric.meta.on_step and metric.meta.is_mean_reduction:
            self._part[key] = value.detach()

    def _end_part(self) -> None:
        for key, value in self._part.items():
            total, weight = self._values.get(key, (0.0, 0.0))
            self._values[key] = total + value * self._share, weight + self._share
        self._part = {}
