"""A running step that may be repeated, and the snapshot of the state that the repetition needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_accel.core.kept_state import Names, can_be_restored
from lightning_accel.core.random_streams import OTHERS, same_state
from lightning_accel.core.state_snapshot import Level, StatePlaces, StateSnapshot
from lightning_accel.core.torch_private.tensors import version_of
from lightning_accel.core.torch_private.training import num_exchanges
from lightning_accel.core.tree import leaves, tensors_in
from lightning_accel.lightning.packages import LightningModule, Trainer
from lightning_accel.lightning.private import logged_results

Step = Callable[..., Any]

# The first snapshots, in training and in evaluation, and then a pair in so many have Python's and NumPy's streams.
_WITH_OTHERS, _WITH_OTHERS_AGAIN = 8, 64
_MOST_BYTES = 1 << 28  # of parameters: a trial's step copies up to three times as much and must not exhaust the memory


class Attempt:
    """A running step, its arguments, and a snapshot of what the step may change."""

    def __init__(
        self, step: Step, given: Any, module: LightningModule, state: SmallState | None, *, is_alone: bool
    ) -> None:
        self.step, self.given = step, given
        self._module, self._state = module, state
        self._is_kept, self._is_training_kept = True, False
        self._exchanges: Callable[[], int] = int if is_alone else num_exchanges
        self._num_exchanges = self._exchanges()
        self._num_optimizer_steps = module.trainer.global_step
        # Without automatic optimization, Lightning does not see the module's own optimizer steps and backward passes.
        self._is_automatic = module.automatic_optimization
        self._parameters = _counting_writes(module) if state is None else state.parameters
        self._trained = self._versions()
        self._required: list[tuple[nn.Parameter, bool]] = []
        if state is None or not self._is_automatic:
            # A module that toggles an optimizer freezes the others' parameters. A repetition must find them unfrozen.
            self._required = [(parameter, parameter.requires_grad) for parameter in self._parameters]
        logged = logged_results(module.trainer)  # its metrics are updated out of place
        also = [] if logged is None else [*(vars(metric) for metric in logged.values()), logged]
        if state is None:
            self._inputs: list[tuple[Tensor, int]] = []
            self._large: list[tuple[Tensor, int]] = []
            self._snapshots = [self._everything([*also, *tensors_in(given)])]
        else:
            self._inputs = [(tensor, version_of(tensor)) for tensor in tensors_in(given) if not tensor.is_inference()]
            self._snapshots = [state.snapshot(also, module.device)]
            state.look()
            self._large = state.versions()

    def _everything(self, also: list[Tensor | Names]) -> StateSnapshot:
        """Makes a snapshot of all that a step changes. Trained state is left out if it cannot be copied.

        With manual optimization, a step may have stepped optimizers before it raises.
        """
        module, trainer = self._module, self._module.trainer
        if trainer.training and trainer.world_size == 1 and sum(p.nbytes for p in module.parameters()) <= _MOST_BYTES:
            try:
                counts = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
                more = [*also, *(vars(one.scheduler) for one in trainer.lr_scheduler_configs)]
                more += [vars(counts.total), vars(counts.current)]
                found = StateSnapshot(module, Level.TRAINING, module.device, also=more, optimizers=trainer.optimizers)
                self._is_training_kept = True
                return found
            except Exception:  # an unknown kind of optimizer: the step is repeated only if it has not trained
                pass
        return StateSnapshot(module, Level.FULL, module.device, also=also)

    def keep_again(self) -> None:
        """Takes a snapshot of the module as it is now, since rank 0 sent its buffers after the step began."""
        self._num_exchanges = self._exchanges()
        try:
            # Without random streams: the first snapshot has them, and a memory meter may be active by now.
            self._snapshots.append((self._state or SmallState(self._module)).of_module())
            self._large = self._state.versions() if self._state else []
        except Exception:  # an error of ours: the user's running step goes on
            self._is_kept = False

    def can_be_repeated(self) -> bool:
        """Returns whether all changes of the step can be undone. Those of a step that reads its loader cannot."""
        reads_its_loader = any(hasattr(leaf, "__next__") for leaf in leaves(self.given))
        has_stepped = self._module.trainer.global_step != self._num_optimizer_steps
        has_trained = not self._is_training_kept and (has_stepped or self._has_trained())
        has_written = any(version_of(tensor) != version for tensor, version in [*self._inputs, *self._large])
        has_written |= self._state is not None and self._state.is_written_unseen
        # The other ranks take part in an exchange (of metrics, of SyncBatchNorm) only once.
        has_exchanged = self._exchanges() != self._num_exchanges
        return self._is_kept and not (reads_its_loader or has_trained or has_written or has_exchanged)

    def _versions(self) -> list[Any]:
        """Returns values that differ after a write to a parameter or, with manual optimization, a new gradient."""
        versions: list[Any] = list(map(version_of, self._parameters))
        if not self._is_automatic:
            gradients = [parameter.grad for parameter in self._parameters]
            versions += [None if grad is None else (id(grad), version_of(grad)) for grad in gradients]
        return versions

    def _has_trained(self) -> bool:
        # A gradient that the step itself has discarded is missed by no repetition.
        return any(now not in (None, before) for before, now in zip(self._trained, self._versions(), strict=True))

    def take_back(self) -> None:
        """Undoes the changes of the step, before each repetition."""
        for snapshot in self._snapshots:
            snapshot.restore()
        for parameter, is_required in self._required:
            parameter.requires_grad = is_required


def begins_gradients(trainer: Trainer) -> bool:
    """Returns whether this batch is the first of an accumulation, so that its gradients are added to no others."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


class SmallState:
    """Takes snapshots of a module at :attr:`Level.SMALL`, and detects writes to its larger tensors.

    Attributes:
        parameters: The parameters whose writes torch counts.
        is_written_unseen: Whether a step writes to large tensors by ``.data``, which no version counts.
    """

    def __init__(self, module: LightningModule) -> None:
        self.parameters = _counting_writes(module)
        self.is_written_unseen = False
        self._module, self._places = module, StatePlaces(module)
        self._sums: list[tuple[Tensor, int, int]] = []
        self._looks_left = 2 if self._places.large else 0
        self._taken = [0, 0]  # snapshots in evaluation and in training
        self._others: dict[str, Any] = {}  # the states of Python's and NumPy's streams in the latest snapshot, if there
        self._draws_from_others = False

    def snapshot(self, also: Iterable[Names], device: torch.device) -> StateSnapshot:
        """Takes a snapshot of the module's state, of the names in ``also``, and of a device's random streams.

        Most snapshots lack the streams of Python and NumPy, since reading these takes 0.1 ms, unless a step or its
        fetch has drawn from them.
        """
        is_training = self._module.training
        taken = self._taken[is_training] = self._taken[is_training] + 1
        if not (self._draws_from_others or taken <= _WITH_OTHERS or taken % _WITH_OTHERS_AGAIN < 2):
            self._others = {}
            return self.of_module(also, device)
        snapshot = self.of_module(also, device, only_torchs_streams=False)
        if not self._draws_from_others:
            before, states = self._others, snapshot.random_states
            self._others = {name: states[name] for name in OTHERS.intersection(states)}
            self._draws_from_others = any(not same_state(self._others.get(n, old), old) for n, old in before.items())
        return snapshot

    def of_module(
        self, also: Iterable[Names] = (), device: torch.device | None = None, *, only_torchs_streams: bool = True
    ) -> StateSnapshot:
        """Takes a snapshot of the module's state now."""
        module, places, less = self._module, self._places, only_torchs_streams
        return StateSnapshot(module, Level.SMALL, device, places=places, also=also, only_torchs_streams=less)

    def versions(self) -> list[tuple[Tensor, int]]:
        """Returns the large tensors (a codebook, a queue), each with its number of writes."""
        found = (names.get(name) for _, names, name in self._places.large)
        return [(t, version_of(t)) for t in found if isinstance(t, Tensor) and not (is_lazy(t) or t.is_inference())]

    def look(self) -> None:
        """Compares the sums of the large tensors before the first and the second step. More sums would be slow."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        unwritten = [(tensor, total) for tensor, version, total in self._sums if version_of(tensor) == version]
        self.is_written_unseen = any(_sum_of(tensor) != total for tensor, total in unwritten)
        large = self.versions() if self._looks_left else ()
        self._sums = [(tensor, version, _sum_of(tensor)) for tensor, version in large if can_be_restored(tensor)]


def _counting_writes(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters whose writes torch counts: all that were not made in inference mode."""
    return [parameter for parameter in module.parameters() if not parameter.is_inference()]


def _sum_of(tensor: Tensor) -> int:
    """Returns the sum of a tensor's bytes, a check that works for every dtype."""
    return int(tensor.detach().reshape(-1).contiguous().view(torch.uint8).sum())
