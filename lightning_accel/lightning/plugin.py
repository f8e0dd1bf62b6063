"""`AccelPlugin`: Lightning's hooks, in the order in which Lightning calls them. What they do is in the techniques."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_accel.core.clocks import seconds
from lightning_accel.core.host import Host
from lightning_accel.core.purse import Purse
from lightning_accel.core.ranks import check_devices
from lightning_accel.core.report import AccelWarning, one_line
from lightning_accel.core.user_frames import is_for_the_user
from lightning_accel.lightning.added_logger import AddedLogger
from lightning_accel.lightning.autocast_precision import AutocastPrecision
from lightning_accel.lightning.met_programs import Program, RunState
from lightning_accel.lightning.packages import LightningModule, TrainerFn
from lightning_accel.lightning.plain_start import PlainStart
from lightning_accel.lightning.plugin_base import Reports
from lightning_accel.lightning.run import Run
from lightning_accel.lightning.start_rules import begins_plain, may_lack_memory, own_format, plain_report
from lightning_accel.lightning.trainer_plugin import TrainerPlugin
from lightning_accel.memory.schedule import MemorySchedule
from lightning_accel.settings import Plan
from lightning_accel.techniques.gradient_checkpointing import MemoryBudget
from lightning_accel.techniques.mixed_precision import ResolvedPrecision, resolve_precision
from lightning_accel.tuning.tuning_result import Tuning

_FABRICS = "Fabric takes another plugin: Fabric(plugins=[AccelFabricPlugin()])."
_WHERE_REFUSED = (
    ', which sets the precision itself (to set it with precision=, use Trainer(strategy="accel"))'
    " and does not run on XLA devices (there, use lightning_accel.AccelXLAPlugin)"
)


class AccelPlugin(TrainerPlugin, AutocastPrecision):
    """Makes a Lightning run faster and smaller: ``Trainer(plugins=[AccelPlugin()])``.

    It takes the settings of a :class:`~lightning_accel.Plan`, which can be set from YAML, too. The module is edited
    when a run starts and restored when it ends, also after an exception; checkpoints are those of a plain Trainer.

    Attributes:
        plan: The settings.
        precision: What the precision came to on the run's device; ``"32-true"`` until that is known.
        scaler: The gradient scaler with ``"16-mixed"``, else None.

    Raises:
        ValueError: A value is not among those allowed, or two settings contradict each other.
    """

    @override
    def _configure(self, settings: dict[str, Any]) -> None:
        self.plan = Plan(**settings)
        self._asked = precision = self.plan.of("precision")
        at_first: ResolvedPrecision = "32-true" if precision == "auto" else precision
        AutocastPrecision.__init__(self, at_first, "cpu", is_chosen=precision == "auto")
        self.purse: Purse | None = None
        self._plain_start: PlainStart | None = None
        self._kept = RunState()
        self._reports = Reports()
        self._memory_schedule: MemorySchedule | None = None

    @property
    def tuning(self) -> Tuning | None:
        """What live trials have come to in the current or the last run; None without them."""
        live = None if self._run is None else self._run.live
        return self._kept.tuning if live is None else live.tuning

    @property
    def memory_schedule(self) -> MemorySchedule | None:
        """With a memory budget, what each block does for it in the current or the last run, once that is decided."""
        budget = None if self._run is None else self._run.engine.technique(MemoryBudget)
        return (budget and budget.memory_schedule) or self._memory_schedule

    # -- a run starts ------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        began = seconds()
        self.teardown()
        if not isinstance(module, LightningModule):
            raise TypeError(f"AccelPlugin is for Trainers, and was given a {type(module).__name__}. {_FABRICS}")
        trainer = module.trainer
        host = Host.detect(trainer.strategy.root_device)
        self.prepare(trainer, host.device_type)
        precision, reason = resolve_precision(self._asked, host)
        if trainer.world_size > 1:
            check_devices(host, precision)
        if self._asked == "auto" and (own := own_format(module)):
            precision, reason = "32-true", f"the model has {own} of its own"
        self._kept.be_of(module)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self._memory_schedule = None
            self._added_logger = AddedLogger.where_wanted(self.plan, trainer, module)
        program = Program(module, host, self.plan, self._kept)
        is_plain = begins_plain(program, precision)
        self.purse = Purse() if is_plain and is_fitting else None
        make_run = functools.partial(Run, program, self, self.purse, functools.partial(self._loggers, trainer))
        start = functools.partial(self._start, precision, reason)
        # A fit, or what it has left in a checkpoint, may have settled what evaluations are to do as well.
        is_proven = self._kept.tuning is not None and self._kept.tuning.is_proven
        if not is_plain or (not is_fitting and is_proven):
            start(make_run())
            return module
        self.set_precision("32-true" if self._asked == "auto" else precision)
        self._reports.begin(plain_report(program, self.precision), is_fitting=is_fitting)
        if may_lack_memory(trainer.strategy.root_device):
            self._run = make_run()
            self._run.guard()
            report = self._run.engine.report  # which tells of a lack of memory
            report.techniques["precision"] = self._reports.running.of("precision")
            self._reports.begin(report, is_fitting=is_fitting)
        if not is_fitting:
            self._stay_plain("no fit has shown that it is faster")
            return module
        assert self.purse is not None
        self._plain_start = PlainStart(program, self.purse, self._run, make_run, start, self._stay_plain)
        self.purse.pay("getting ready", seconds() - began)
        return module

    def _start(
        self,
        precision: ResolvedPrecision,
        reason: str,
        run: Run,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        """Puts the plan to work: when the run starts, or between two steps of a fit that began plain."""
        self._run = run
        self.set_precision(precision)
        report = run.engine.report
        self._reports.begin(report, is_fitting=run.is_fitting)
        report.of("precision").change("decided", f"{precision}: {reason}", is_on=precision != "32-true")
        run.start(left_out)
        if self._plain_start is not None:
            self._add_optimizers(run.trainer.optimizers)
            self.accept(run.trainer.optimizers)

    def _add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        assert self._run is not None
        if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            self.give_up(self._run.engine.report, "LBFGS compares the gradients of one step with those of others")
        self._run.engine.add_optimizers(optimizers)

    def _stay_plain(self, reason: str) -> None:
        """Has the whole run be the user's own."""
        put_on = [] if self._run is None else [one.name for one in self._run.memory.put_on]
        for name, record in self._reports.running.techniques.items():
            if record.state == "waiting":
                record.change("left out", f"not tried: {reason}")
            record.is_on &= name in ("precision", *put_on)
        self._use_lightnings_methods()

    @override
    def _use_lightnings_methods(self) -> None:
        is_by_hand = self._plain_start is not None and self._plain_start.is_by_hand
        if self._run is None and not is_by_hand:
            super()._use_lightnings_methods()

    def _retire(self, *, for_good: bool = False) -> None:
        """Has the rest of the run be the user's own: nothing was faster, or our own work has failed."""
        if self._run is not None and self._run.is_started:
            self._run.close()
            self._run = None
        if self._asked == "auto":
            self.set_precision("32-true")
        if self._plain_start is not None and (for_good or not self._plain_start.goes_on()):
            self._plain_start.close()
            self._use_lightnings_methods()

    def _stop_after(self, error: Exception) -> None:
        """Has the rest of the run be the user's own, since the plain start has raised an error of ours."""
        run = self._run
        saves_memory = self._kept.put_on or (run is not None and run.memory.put_on)  # and cannot do without
        if is_for_the_user(error) or saves_memory:
            raise error
        message = f"between two steps, this plugin raised {one_line(error)}"
        if run is not None:
            run.mend()
        self.give_up(self._reports.running, message)
        self._retire(for_good=True)
        self._stay_plain(message)
        message += ". The rest of the run is the user's own"
        self.note(message)
        warnings.warn(message, AccelWarning, stacklevel=2)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self._run is not None and self._run.is_started:
            self._add_optimizers(optimizers)
        return super().connect(model, optimizers, lr_schedulers)

    # -- a step ------------------------------------------------------------------------------------------------

    @override
    def convert_input(self, data: Any) -> Any:
        if self._plain_start is not None:
            try:
                self._plain_start.batch(data)
            except Exception as error:
                self._stop_after(error)
        live = None if self._run is None else self._run.live
        if live is not None and live.expects_batch:
            live.batch(data)
        if self._run is not None and self._run.is_over:
            self._retire(for_good=live is not None and live.have_failed)
        return super().convert_input(data)

    @override
    def _interrupt(self) -> None:
        if self._plain_start is not None:
            self._plain_start.steps.interrupt()
        super()._interrupt()

    @override
    def _step(self, stage: str) -> AbstractContextManager[None]:
        if stage == "validate":
            self._interrupt()
        if stage != "train":
            return super()._step(stage)
        step = super()._step(stage)
        if self._run is None and self._plain_start is not None and self._plain_start.is_by_hand:
            step = self._plain_start.around(step)
        return step if self.scaler is None else self._scaled_step(step)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        step = self._lightnings.optimizer_step if self.scaler is None else self.scaled_optimizer_step
        if self._run is not None and self._run.is_started:
            self._run.add_optimizer(optimizer)
            return step(optimizer, model=model, closure=closure, **kwargs)
        try:
            result = step(optimizer, model=model, closure=closure, **kwargs)
        except Exception as error:
            if self._plain_start is not None:
                self._plain_start.raised(error)
            raise
        if self._plain_start is not None and not self._plain_start.is_over:
            self._plain_start.steps.stepped()
        return result

    # -- checkpoints -------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._run is not None:
            self._run.keep()
        return self._kept.to_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        decisions = self._kept.load(state_dict)
        self._kept.decisions.update(decisions)
        if self._run is not None and self._run.is_started:
            self._run.resume(decisions)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self._interrupt()
        if self._run is not None:
            self._run.engine.restore_layouts(checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get(AccelPlugin.__qualname__)
        if state is not None:
            self.load_state_dict(state)

    # -- a run ends --------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._plain_start is not None:
            self._plain_start.close()
            if self._run is None or not self._run.is_started:
                self._stay_plain("the run was over before it could pay for that")
            self._plain_start = None
        self._memory_schedule = self.memory_schedule
        self._end_run()
        self._aside.undo()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Copies and other processes get the settings, the scaler and what is kept; a run in progress stays here.
        running = ("_run", "_plain_start", "_added_logger", "purse")
        return {**super().__getstate__(), **dict.fromkeys(running), "_kept": copy(self._kept)}

    @override
    def __format__(self, format_spec: str) -> str:
        # Lightning refuses a plugin with an f-string that contains it, and calls nothing else of ours before.
        return format(repr(self), format_spec) + _WHERE_REFUSED
