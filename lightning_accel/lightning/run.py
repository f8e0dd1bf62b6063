"""One run of a Trainer: makes its parts when it starts, and closes them when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger, leave_page_of_evaluation
from lightning_accel.core.clocks import seconds
from lightning_accel.core.host import Host
from lightning_accel.core.layout import restore_layouts
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.purse import Purse
from lightning_accel.experiment.store import Key
from lightning_accel.lightning.autocast_precision import AutocastPrecision
from lightning_accel.lightning.batch_transfer import BatchTransfer
from lightning_accel.lightning.live_trials import LiveTuning, set_choices
from lightning_accel.lightning.oom_recovery import OomRecovery
from lightning_accel.lightning.packages import LightningModule, ModelParallelStrategy, Trainer
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.run_state import RunState
from lightning_accel.lightning.split_batches import SplitBatches
from lightning_accel.lightning.start_rules import may_lack_memory
from lightning_accel.lightning.step_outputs import StepOutputs
from lightning_accel.lightning.step_retry import StepRetry
from lightning_accel.lightning.technique_layers import BatchLayer, LoaderLayer
from lightning_accel.memory.oom_report import StepMemoryError
from lightning_accel.settings import Plan
from lightning_accel.step.layers import Layer, StepPipeline
from lightning_accel.technique_run import Decisions
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.memory_format import MemoryFormat
from lightning_accel.techniques.mixed_precision import Autocast

_LOOK = 0.01  # the largest share of a turn for the inspection before each switch


class Run:
    """A plan applied to the module of a Trainer.

    Attributes:
        engine: The engine. It acts on the module once the run is started.
        is_fitting: Whether the run is a fit.
        is_started: Whether the plan is applied.
        memory: The recovery from out-of-memory errors.
        pipeline: The layers around its steps. They are removed for a step that runs as the user wrote it.
        live: The live trials; None if there are none.
    """

    def __init__(
        self,
        module: LightningModule,
        host: Host,
        plan: Plan,
        precision: Autocast,
        kept: RunState,
        purse: Purse | None = None,
        loggers: Callable[[], Sequence[SpeedMemoryLogger]] = tuple,
    ) -> None:
        self._module, self._plan, self._precision, self._kept = module, plan, precision, kept
        self._purse, self._loggers = purse, loggers
        self.engine = RunEngine(module, host, plan, precision, kept, purse)
        self.is_fitting = self.engine.is_fitting
        self.is_started = False
        self._is_answering = plan.on_oom != "off"
        # FSDP's ranks gather parameters within a step, so that no rank can repeat it alone.
        self._can_repeat = not isinstance(module.trainer.strategy, ModelParallelStrategy)
        may_split = plan.on_oom == "split" and self.is_fitting and self._can_repeat
        self._split = SplitBatches(self.engine) if may_split else None
        self.memory = OomRecovery(self.engine, is_on=self._is_answering, split=self._split, leave=self._leave_page)
        self._retry: StepRetry | None = None
        self._outputs: StepOutputs | None = None
        self._stepping: Optimizer | None = None  # the optimizer that stepped last
        self._others = PatchSet()  # patches that stay while the pipeline is removed
        self.pipeline = StepPipeline()
        self._switches, self._look_s = 0, 0.0  # seconds of the latest search for tensors that outlive a step

    @property
    def trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def live(self) -> LiveTuning | None:
        return self.engine.live

    @property
    def is_over(self) -> bool:
        """Whether a fit that began plain continues plain: no option has won, and memory cannot run out."""
        if self._purse is None or not self.is_started or self.memory.put_on:
            return False
        has_ended = self.live is None or self.live.has_ended
        return has_ended and not may_lack_memory(self.engine.context.device)

    def guard(self) -> None:
        """Guards the steps before :meth:`start` against a lack of memory, if one is possible."""
        if self._is_answering and may_lack_memory(self._module.trainer.strategy.root_device):
            self.pipeline.add(*self._guards())

    def start(self, left_out: Mapping[str, str] | None = None, program: Key | None = None) -> None:
        """Starts all parts. If it raises an error, :meth:`close` undoes its changes."""
        trainer, plan, engine = self._module.trainer, self._plan, self.engine
        wants_pipeline = getattr(trainer.strategy, "wants_pipeline", False)
        self.is_started = True
        self.pipeline.clear()
        engine.begin(left_out)
        self.memory.put_on_again(self._kept.put_on if self.is_fitting else [])
        self.pipeline.add(*self._guards())
        if engine.alters_steps:
            self.pipeline.add(BatchLayer(trainer, engine, self._with_own_layouts))
        if self.is_fitting and any(type(one).loader is not Technique.loader for one in engine.context.techniques):
            self._add(LoaderLayer(trainer, engine, is_piped=wants_pipeline))
        if plan.preprocess or wants_pipeline:
            transforms = plan.of("preprocess").transforms
            self._add(BatchTransfer(trainer, engine, transforms, self._precision.image_dtype))
        if self.is_fitting:
            if plan.trust == "measured" and (engine.alters_steps or engine.is_at_work):
                engine.live = LiveTuning(
                    trainer,
                    engine,
                    self._kept.tuning,
                    self._loggers,
                    self._switched,
                    repr(plan),
                    self._purse,
                    program,
                )
                self._add(*engine.live.turns.patches())
        elif self._kept.tuning is not None and plan.trust != "checked":
            set_choices(engine, engine.arms(), self._kept.tuning.choices)

    def _guards(self) -> Iterator[Layer]:
        """Yields the layers that guard the steps of this run."""
        precision = self._precision
        if self._split is not None:
            yield self._split
        if isinstance(precision, AutocastPrecision):  # XLA has another precision, and executes a step after its end
            engine = self.engine
            self._outputs = StepOutputs(engine, self._can_repeat_step)
            if engine.alters_steps:
                yield self._outputs
            if self._can_repeat and (engine.alters_steps or (self._is_answering and self.is_fitting)):
                self._retry = StepRetry(engine, precision, self._outputs, self.memory)
                yield self._retry
        if self._is_answering:
            yield self.memory

    def close(self) -> None:
        """Restores the module and the Trainer, and stores the state for the next run."""
        self.keep()
        self.memory.close()
        self._others.undo()
        self.pipeline.clear()
        self.engine.undo()

    def keep(self) -> None:
        """Stores the verdicts and settings of the run in ``kept``, for the next run and for checkpoints."""
        if self.is_fitting:
            self._kept.put_on = self.memory.written
        if self.live is not None:
            self._kept.tuning = self.live.settled

    def resume(self, decisions: Decisions) -> None:
        """Continues from a checkpoint after the run state was loaded from it."""
        self.engine.decisions.update(decisions)
        self.memory.put_on_again(self._kept.put_on if self.is_fitting else [])
        self.engine.carry_out(decisions)
        if self.live is not None and self._kept.tuning is not None:
            self.live.resumed = self._kept.tuning

    def _leave_page(self, page: StepMemoryError) -> None:
        """Writes the page to a file. In a fit, the SpeedMemoryLogger does so."""
        if self._plan.report and not self.is_fitting:
            leave_page_of_evaluation(self._module.trainer, page)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Shows an optimizer that is about to step to the techniques. It may have been made during the run."""
        if optimizer is not self._stepping:
            self._stepping = optimizer
            self.engine.add_optimizers([optimizer])

    def restore_layouts(self, checkpoint: dict[str, Any]) -> None:
        """Gives the tensors of a checkpoint the memory layouts that the user's tensors had before the run."""
        memory_format = self.engine.technique(MemoryFormat)
        if memory_format is not None:
            restore_layouts(checkpoint, self._module, self._module.trainer.optimizers, memory_format.strides())

    def _switched(self, is_plain: bool) -> None:
        """Prepares, between two steps, for a next step that runs differently from the last one."""
        if self._outputs is not None and self._may_look():
            began = seconds()
            self._outputs.mend()
            self._look_s = seconds() - began
            if self._purse is not None:
                self._purse.pay("looking for what outlives a step", self._look_s)
        if self._purse is None or may_lack_memory(self._module.trainer.strategy.root_device):
            return
        with self._purse.paying("switching"):
            self.pipeline.let_stand(not is_plain)

    def _may_look(self) -> bool:
        """Returns whether to search for tensors of earlier steps before a switch: more rarely if steps are short."""
        self._switches += 1
        turn_s = None if self._purse is None else self._purse.turn_s
        return turn_s is None or self._look_s <= _LOOK * turn_s or self._switches.bit_count() == 1

    def _can_repeat_step(self) -> bool:
        return self._retry is not None and self._retry.can_repeat

    def _add(self, *patches: Patch) -> None:
        for patch in patches:
            self._others.add(patch)
            patch.apply()

    def _with_own_layouts(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.restore_layouts(checkpoint := {"state_dict": state_dict})
        return checkpoint["state_dict"]
