"""One run of a Trainer: makes its parts when it starts, and closes them when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch.optim import Optimizer

from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger
from lightning_accel.core.clocks import seconds
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.purse import Purse
from lightning_accel.lightning.autocast_precision import AutocastPrecision
from lightning_accel.lightning.batch_transfer import BatchLayer, BatchTransfer, LoaderLayer
from lightning_accel.lightning.live_trials import LiveTuning
from lightning_accel.lightning.met_programs import Program
from lightning_accel.lightning.oom_recovery import OomRecovery
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.start_rules import may_lack_memory
from lightning_accel.lightning.step_outputs import LOOKING, StepOutputs
from lightning_accel.lightning.step_retry import StepRetry
from lightning_accel.step.layers import Layer, StepPipeline
from lightning_accel.technique_run import Decisions
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.mixed_precision import Autocast
from lightning_accel.tuning.turns import set_choices

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
        program: Program,
        precision: Autocast,
        purse: Purse | None = None,
        loggers: Callable[[], Sequence[SpeedMemoryLogger]] = tuple,
    ) -> None:
        self.trainer, self._purse, self._loggers = program.module.trainer, purse, loggers
        self.engine = RunEngine(program, precision, purse)
        self.is_fitting = self.engine.is_fitting
        self.is_started = False
        self.memory = OomRecovery(self.engine)
        self._outputs: StepOutputs | None = None
        self._stepping: Optimizer | None = None  # the optimizer that stepped last
        self.live: LiveTuning | None = None
        self._others = PatchSet()  # patches that stay while the pipeline is removed
        self.pipeline = StepPipeline()
        self._switches, self._look_s = 0, 0.0  # seconds of the latest search for tensors that outlive a step

    @property
    def is_over(self) -> bool:
        """Whether a fit that began plain continues plain: no option has won, and memory cannot run out."""
        if self._purse is None or not self.is_started or self.memory.put_on:
            return False
        has_ended = self.live is None or self.live.has_ended
        return has_ended and not may_lack_memory(self.engine.context.device)

    def guard(self) -> None:
        """Guards the steps before :meth:`start` against a lack of memory, if one is possible."""
        if self.memory.is_on and may_lack_memory(self.engine.context.device):
            self.pipeline.add(*self._guards())

    def start(self, left_out: Mapping[str, str] | None = None) -> None:
        """Starts all parts. If it raises an error, :meth:`close` undoes its changes."""
        engine, plan, kept = self.engine, self.engine.plan, self.engine.kept
        self.is_started = True
        self.pipeline.clear()
        engine.begin(left_out)
        self.memory.put_on_again()
        self.pipeline.add(*self._guards())
        if engine.alters_steps:
            self.pipeline.add(BatchLayer(engine))
        if self.is_fitting and any(type(one).loader is not Technique.loader for one in engine.context.techniques):
            self._add(LoaderLayer(engine))
        if plan.preprocess or getattr(self.trainer.strategy, "wants_pipeline", False):
            self._add(BatchTransfer(engine))
        if self.is_fitting:
            if plan.trust == "measured" and (engine.alters_steps or engine.is_at_work):
                self.live = engine.live = LiveTuning(engine, self._loggers, self._switched)
                self._add(*self.live.patches())
        elif kept.tuning is not None and plan.trust != "checked":
            choices = kept.tuning.choices
            set_choices(engine, engine.arms(), choices, pauses=lambda name: name not in choices)

    def _guards(self) -> Iterator[Layer]:
        """Yields the layers that guard the steps of this run."""
        engine, precision, is_on = self.engine, self.engine.precision, self.memory.is_on
        if self.memory.split is not None:
            yield self.memory.split
        if isinstance(precision, AutocastPrecision):  # XLA has another precision, and executes a step after its end
            self._outputs = StepOutputs(engine)
            if engine.alters_steps:
                yield self._outputs
            # FSDP's ranks gather parameters within a step, so that no rank can repeat it alone.
            if not engine.is_sharded and (engine.alters_steps or (is_on and self.is_fitting)):
                yield StepRetry(engine, precision, self._outputs, self.memory)
        if is_on:
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
            self.engine.kept.put_on = self.memory.written
        if self.live is not None:
            self.engine.kept.tuning = self.live.settled

    def resume(self, decisions: Decisions) -> None:
        """Continues from a checkpoint after the run state was loaded from it."""
        self.engine.decisions.update(decisions)
        self.memory.put_on_again()
        self.engine.carry_out(decisions)
        if self.live is not None and self.engine.kept.tuning is not None:
            self.live.resumed = self.engine.kept.tuning

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Shows an optimizer that is about to step to the techniques. It may have been made during the run."""
        if optimizer is not self._stepping:
            self._stepping = optimizer
            self.engine.add_optimizers([optimizer])

    def _switched(self, is_plain: bool) -> None:
        """Prepares, between two steps, for a next step that runs differently from the last one."""
        if self._may_look():
            began = seconds()
            self.mend()
            self._look_s = seconds() - began
            if self._purse is not None:
                self._purse.pay(LOOKING, self._look_s)
        if self._purse is None or may_lack_memory(self.engine.context.device):
            return
        with self._purse.paying("switching"):
            self.pipeline.enable(not is_plain)

    def mend(self) -> None:
        """Gives what earlier steps have left the form that a plain step expects."""
        if self._outputs is not None:
            self._outputs.mend()

    def _may_look(self) -> bool:
        """Returns whether to search for tensors of earlier steps before a switch: more rarely if steps are short."""
        self._switches += 1
        turn_s = None if self._purse is None else self._purse.turn_s
        return turn_s is None or self._look_s <= _LOOK * turn_s or self._switches.bit_count() == 1

    def _add(self, *patches: Patch) -> None:
        for patch in patches:
            self._others.add(patch)
            patch.apply()
