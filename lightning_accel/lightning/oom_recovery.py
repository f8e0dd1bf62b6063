"""Recovery of a run from out-of-memory errors: it puts on techniques that need less, or ends the run with a page.

The techniques change no number and stay for the rest of the run: packing, selective checkpointing, offloading (on a
GPU), full checkpointing. The cheapest in time comes first. Last, if the user asks for it, the batch goes through the
step in parts. A search for a batch size needs the original error, and gets it.
"""

from __future__ import annotations

import warnings
from typing import Any

from typing_extensions import override

from lightning_accel.assembly import NamedFallback, fallbacks_for
from lightning_accel.callbacks._fit_timeline import timeline_of
from lightning_accel.callbacks._tuner_searches import Searches
from lightning_accel.callbacks.speed_memory import leave_page_of_evaluation
from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.oom_errors import is_out_of_memory
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.report import AccelWarning, one_line
from lightning_accel.core.tree import tensors_in
from lightning_accel.lightning.oom_page import OPTIMIZER, TRAINING, headline, outcome, remedies
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.split_batches import SplitBatches
from lightning_accel.lightning.step_snapshot import begins_gradients
from lightning_accel.memory.oom_report import (
    SAME_WHERE,
    Inventory,
    StepMemoryError,
    error_with,
    page,
    take_inventory,
    who_asked,
)
from lightning_accel.memory.pressure import Pressure, Toll
from lightning_accel.step.layers import STEPS, Call, Layer

_WITHIN = {"training_step": "forward pass", "backward": "backward pass", "optimizer_step": OPTIMIZER}
SPLIT = "split"
"""The name for split batches, among the techniques that were put on."""


class OomRecovery(Layer):
    """Out-of-memory recovery of one run.

    As a layer, it raises the page in place of the original error. The retry layer asks it for less memory.

    Attributes:
        is_on: Whether the plan requests it.
        split: The layer that sends batches through the step in parts; None if they stay whole.
        put_on: The techniques that were put on, in order, without split batches.
        why: Why the step cannot run again, for the page.
    """

    name = "oom_report"

    def __init__(self, engine: RunEngine) -> None:
        trainer, on_oom = engine.module.trainer, engine.plan.on_oom
        super().__init__([(trainer.strategy, STEPS), (engine.precision, ("backward", "optimizer_step"))])
        self.put_on: list[NamedFallback] = []
        self._engine, self._module, self._context = engine, engine.module, engine.context
        self.is_on = on_oom != "off"
        self._may_answer = self.is_on and trainer.world_size == 1
        may_split = on_oom == "split" and engine.is_fitting and not engine.is_sharded
        self.split = SplitBatches(engine) if may_split else None
        self._searches = Searches(trainer)
        self._left: list[NamedFallback] | None = None  # found on the first request
        self._pressure = Pressure(self._context.device)
        self._toll = Toll(self._context.device, timeline_of(trainer))
        self._said = ""  # the message on what was put on, until its cost is known
        self._failed: tuple[str, Inventory] | None = None  # who asked for memory, and who held it, at the last failure
        self._answered: list[str] = []  # the names of the techniques put on in the current step
        self._batch: Any = None
        self.why = ""

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        is_training_step = stage == "training_step"
        if is_training_step or stage in STEPS:
            self._batch = args[:1]
            if not is_training_step:
                self._toll.interrupt()
            elif self._toll.step_begins():
                self._tell_toll()
        try:
            outputs = call(*args, **kwargs)
        except Exception as error:
            self.end(error, _WITHIN.get(stage, stage))
            raise
        goes_backward = is_training_step and self._module.automatic_optimization
        if not (goes_backward or stage == "optimizer_step"):
            self._batch = None  # no further computation uses the batch
        return outputs

    @property
    def lets_pass(self) -> bool:
        """Whether other code, a search for a batch size, catches the errors."""
        return self._searches.are_running()

    def may_run_out(self, given: Any) -> bool:
        """Returns whether the next training step may run out of memory and could then run again with less."""
        return self._may_answer and self._pressure.may_run_out(given)

    def close(self) -> None:
        """Reports the known cost when the run ends."""
        self._tell_toll()
        self._toll.close()
        self._batch = self._failed = None

    # -- a step has run out of memory ------------------------------------------------------------------------------

    def saw(self, error: Exception) -> None:
        """Notes who asked for memory and who holds it, while the frames of the error still exist."""
        trainer = self._module.trainer
        inventory = take_inventory(self._module, trainer.optimizers, self._batch, self._context.device, error)
        self._failed = who_asked(error, self._module), inventory

    def put_on_next(self) -> bool:
        """Puts on the cheapest remaining technique. Returns whether one was left."""
        if not self._may_answer:
            return False
        if self._left is None:
            self._left = self._not_yet()
        while self._left:
            if self._can_be_had(self._left.pop(0)):
                return True
        self.why = f"nothing is left that would need less memory and change no number{self._not_tried()}"
        if self.split is None:
            return False
        why = self.split.halve(self._batch[0])
        if why:
            self.why += f", and {why}"
            return False
        self._answered.append(SPLIT)
        return True

    def put_on_again(self) -> None:
        """Puts on the techniques of an earlier part of a fit."""
        put_on = self._engine.kept.put_on if self._engine.is_fitting else []
        for named in self._not_yet() if put_on else ():
            if (named.name, named.settings) in put_on:
                self._can_be_had(named)
        self._answered.clear()
        self._left = None
        most = dict(put_on).get(SPLIT)
        if most is not None and self.split is not None:
            self.split.begin(most)
        elif most is not None:
            self._engine.report.note(
                f"the run before had its batches in parts of at most {most} samples, against a lack of memory: this one"
                " has not, without memory.on_oom='split'"
            )

    @property
    def written(self) -> list[tuple[str, Any]]:
        """Returns the techniques that were put on, as checkpoints store them: pairs of a technique and its settings."""
        most = None if self.split is None else self.split.most
        return [(one.name, one.settings) for one in self.put_on] + ([] if most is None else [(SPLIT, most)])

    def take_off(self, error: Exception) -> bool:
        """Reverts the last technique that was put on, since the step raised another error with it.

        Returns:
            Whether any technique was put on in this step.
        """
        if not self._answered:
            return False
        if self.split is not None and self._answered[-1] == SPLIT:
            self._answered.pop()
            self.split.give_up(f"a step raised {one_line(error)}")
        else:
            self._take_off(self.put_on[-1], f"a step raised {one_line(error)}")
        return True

    def ran(self) -> None:
        """Reports which techniques were put on, after the step has run again."""
        self._engine.interrupt()
        if self._answered and self._failed is not None:
            inventory = self._failed[1]
            answers = ", ".join(str(named) for named in self.put_on if named.name in self._answered)
            changes = "which changes no number and takes more time"
            if SPLIT in self._answered:
                answers = f"{answers}{', ' * bool(answers)}{self.split}"
                changes = f"which takes more time, and gives {SAME_WHERE}"
            self._said = f"out of memory: {answers} put on at step {self._module.trainer.global_step}"
            self._toll.ask(inventory.wanted_bytes)
            line = (
                f"{self._said}: it needed more than {format_bytes(inventory.wanted_bytes)} of the"
                f" {format_bytes(inventory.limit_bytes)} there are. The step has run again with that, {changes}; it"
                " stays on."
            )
            self._engine.report.note(line, key=self._said)
            warnings.warn(line, AccelWarning, stacklevel=2)
        self._answered, self._failed = [], None

    # -- the end ---------------------------------------------------------------------------------------------------

    def end(self, error: Exception, within: str) -> None:
        """Raises the page in place of an out-of-memory error.

        Raises:
            StepMemoryError: The page.
        """
        ending = self._ending(error, within)
        if ending is not None:
            # In a fit, the SpeedMemoryLogger leaves it.
            if self._engine.plan.report and not self._engine.is_fitting:
                leave_page_of_evaluation(self._module.trainer, ending)
            raise ending from error

    def _ending(self, error: Exception, within: str) -> StepMemoryError | None:
        if not self.is_on or isinstance(error, StepMemoryError) or not is_out_of_memory(error) or self.lets_pass:
            return None
        try:
            if self._failed is None:
                self.saw(error)
            assert self._failed is not None, "that was noted"
            ending = self._page(error, within, *self._failed)
        except Exception as wrong:
            self._engine.report.note(f"the page on a lack of memory could not be written: {one_line(wrong)}")
            return None
        self._failed = None
        return ending

    def _page(self, cause: Exception, within: str, asked: str, inventory: Inventory) -> StepMemoryError:
        trainer, left = self._module.trainer, self._not_yet()
        is_training, is_split = within in TRAINING, self.split is not None and self.split.most is not None
        if within == OPTIMIZER:
            asked = f"  {', '.join(type(one).__name__ for one in trainer.optimizers)}\n{asked}"
        can_be_taken_back = within == "forward pass" or begins_gradients(trainer)
        # Half batches, which the user has not requested, might have passed the step.
        may_split = self.split is None and self._module.automatic_optimization and can_be_taken_back
        put_on = [outcome(self._engine, named) for named in self.put_on]
        text = page(
            cause,
            headline(trainer, within, self.why, is_split=is_split),
            asked,
            inventory,
            [*put_on, f"memory.on_oom='split': {self.split}"] if is_split else put_on,
            remedies(left) if is_training and within != OPTIMIZER else [],
            next((len(tensor) for tensor in tensors_in(self._batch) if tensor.dim()), None),
            trainer.accumulate_grad_batches if is_training else None,
            may_split=self._may_answer and may_split,
        )
        return error_with(text, cause)

    # -- techniques that need less memory --------------------------------------------------------------------------

    def _not_yet(self) -> list[NamedFallback]:
        """Returns the fallbacks that are not put on and cost more than the ones that are."""
        known = {named.name: named.fallback.costs for named in self.put_on}
        try:
            found = fallbacks_for(self._context)
        except Exception as error:  # an error of ours must not hide the user's
            self._engine.report.note(f"what could need less memory could not be found: {one_line(error)}")
            return []
        return [one for one in found if one.fallback.costs > known.get(one.name, -1.0)]

    def _not_tried(self) -> str:
        """Describes what else the user could do."""
        left = self._not_yet()
        if any(one.fallback.only_anew for one in left):
            return ", but for what a run can have from its beginning only"
        told = self._context.settings["gradient_checkpointing"].mode, self._context.settings["memory_budget"].budget
        if told != ("off", "off") or any(one.name == "gradient_checkpointing" for one in (*self.put_on, *left)):
            return ""
        return f" (gradient_checkpointing finds no blocks in {type(self._module).__name__}: name some)"

    def _can_be_had(self, named: NamedFallback) -> bool:
        if named.fallback.only_anew:
            return False
        # Activations that are recomputed need not be packed. So a technique that was not enough is taken off.
        for former in [one for one in self.put_on if one.name in self._answered and one.fallback.keeps is None]:
            self._take_off(former, f"it was not enough, and {named.name} leaves little to it")
        technique = named.make(self._context)
        try:
            if technique is None or not self._engine.add(technique):
                return False
        except Exception as error:
            self._engine.withdraw(named.name, f"could not be put on: {one_line(error)}")
            return False
        self.put_on = [*(one for one in self.put_on if one.name != named.name), named]
        self._answered = [*(name for name in self._answered if name != named.name), named.name]
        return True

    def _take_off(self, named: NamedFallback, why: str) -> None:
        self.put_on.remove(named)
        self._answered.remove(named.name)
        self._engine.withdraw(named.name, why)

    def _tell_toll(self) -> None:
        before, after, ratio = self._toll.known() or (0, None, None)
        costs = [] if after is None else [f"peak {format_bytes(before)} or more → {format_bytes(after)}"]
        costs += [] if ratio is None else [f"step {ratio:.2f}x"]
        if costs:
            line = f"{self._said}: {', '.join(costs)}"
            self._engine.report.note(line, key=self._said)
            rank_zero_info(f"lightning-accel: {line}")
