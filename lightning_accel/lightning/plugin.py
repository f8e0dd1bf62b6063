"""`AccelPlugin`: Lightning's hooks, in the order in which Lightning calls them. What they do is in the techniques."""

from __future__ import annotations

import functools
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.arguments import Arguments
from lightning_accel.assembly import surroundings_for
from lightning_accel.callbacks.speed_memory import add_speed_memory_logger
from lightning_accel.core.host import Host
from lightning_accel.core.layout import restore_layouts
from lightning_accel.core.patch import MethodPatch, Patch, PatchSet
from lightning_accel.core.ranks import check_devices, gather
from lightning_accel.core.report import Report
from lightning_accel.core.trial import one_line
from lightning_accel.engine import Decisions, Engine
from lightning_accel.lightning.autocasting import AutocastingPrecision, ResolvedPrecision, nested
from lightning_accel.lightning.feeding import Feeding, followed_by
from lightning_accel.lightning.live_trials import LiveTuning, have
from lightning_accel.lightning.loaders import Loaders
from lightning_accel.lightning.out_of_memory import OPTIMIZER, MemoryAnswers
from lightning_accel.lightning.safety_net import SafetyNet
from lightning_accel.memory.schedule import MemorySchedule
from lightning_accel.settings import Plan
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.gradient_checkpointing import MemoryBudget
from lightning_accel.techniques.memory_format import MemoryFormat
from lightning_accel.techniques.mixed_precision import DTYPES, check_optimizer, resolve_precision
from lightning_accel.techniques.notes import Verdict
from lightning_accel.techniques.registry import declarations
from lightning_accel.tuning.settled import Tuning

_NAMES_DTYPE = re.compile(r"dtype|scalar type|[Hh]alf|[Bb]?[Ff]loat(16|32)")


class AccelPlugin(Arguments, AutocastingPrecision):
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
        AutocastingPrecision.__init__(self, "32-true" if self.plan.precision == "auto" else self.plan.precision)
        self._engine: Engine | None = None
        self._net: SafetyNet | None = None
        self._memory: MemoryAnswers | None = None
        self._put_on: list[tuple[str, Any]] = []  # against a lack of memory
        self._report = Report()
        self._memory_schedule: MemorySchedule | None = None
        self._hooks = PatchSet()
        self._feeding: Feeding | None = None
        self._loaders: Loaders | None = None
        self._live: LiveTuning | None = None
        self._tuning: Tuning | None = None  # that an earlier fit, or a checkpoint, has settled
        self._decided_for: weakref.ref[nn.Module] | None = None
        self._decisions: Decisions = {}
        self._decisions_without_gradients: Decisions = {}
        self._is_fitting = False

    @classmethod
    def from_plan(cls, plan: Plan) -> AccelPlugin:
        """The plugin for a plan made elsewhere."""
        return cls(**vars(plan))

    @property
    def report(self) -> Report:
        """What was done in the current or the last run, where, and why not elsewhere."""
        return self._report

    @property
    def memory_schedule(self) -> MemorySchedule | None:
        """With a memory budget, what each block does for it in the current or the last run, once that is decided."""
        budget = None if self._engine is None else self._engine.technique(MemoryBudget)
        return (budget and budget.memory_schedule) or self._memory_schedule

    @property
    def memory_plan(self) -> MemorySchedule | None:
        """The older name of :attr:`memory_schedule`, until 0.3."""
        warnings.warn("memory_plan is now memory_schedule; the old name goes in 0.3.", FutureWarning, stacklevel=2)
        return self.memory_schedule

    # -- a run starts ------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self.teardown()
        assert isinstance(module, LightningModule)
        trainer = module.trainer
        strategy = trainer.strategy
        self._is_fitting = trainer.state.fn == TrainerFn.FITTING
        host = Host.detect(strategy.root_device)
        precision, reason = resolve_precision(self.plan.precision, host)
        if trainer.world_size > 1:
            check_devices(host, precision)
        self.device = host.device_type
        self._set_precision(cast(ResolvedPrecision, precision))
        around = surroundings_for(self.plan, module, host, device=strategy.root_device)
        engine = self._engine = self._engine_for(module, host, around.techniques)
        self._report = engine.report
        record = self._report.of("precision")
        record.is_on, record.status = precision != "32-true", f"{precision}: {reason}"
        is_answering = self.plan.out_of_memory == "answer"
        self._memory = MemoryAnswers(module, engine, around, is_on=is_answering, interrupt=self._interrupt)
        self._memory.have(self._put_on if self._is_fitting else [])
        # FSDP's ranks gather parameters within a step, which none can repeat alone.
        can_repeat = not isinstance(strategy, ModelParallelStrategy)
        if can_repeat and (self._is_in_force() or (is_answering and self._is_fitting)):
            self._net = SafetyNet(
                module,
                engine,
                self._is_in_force,
                self._without_precision,
                self._memory,
                self._yields,
                self._gives_up,
            )
            self._hook(self._net.patches(strategy))
        if self._is_in_force():
            self._hook(self._passages(strategy, engine))
        if self._is_fitting and any(type(one).loader is not Technique.loader for one in around.techniques):
            self._loaders = Loaders(trainer, engine, is_piped=getattr(strategy, "wants_pipeline", False))
            self._hook(self._loaders.patches())
        if is_answering:
            self._hook(self._memory.patches(strategy))
        if self.plan.preprocess or getattr(strategy, "wants_pipeline", False):
            transforms, dtype = self.plan.of("preprocess").transforms, DTYPES.get(self.precision, torch.float32)
            self._feeding = Feeding(trainer, engine, transforms, dtype, around.wants_channels_last)
            self._hook(self._feeding.patches())
        if self._is_fitting:
            has_something = self._is_in_force() or engine.is_at_work
            if self.plan.tune == "auto" and self.plan.verify and has_something:
                self._live = LiveTuning(trainer, engine, self._own_arms(), self._tuning, repr(self.plan))
                self._hook(self._live.turns.patches())
            if self.plan.log:
                add_speed_memory_logger(trainer, module)
            rank_zero_info(self._report.summary())
        elif self._tuning is not None and self.plan.tune == "auto":
            have(engine, [*self._own_arms(), *engine.arms()], self._tuning.choices)
        return module

    def _engine_for(self, module: LightningModule, host: Host, techniques: Sequence[Technique]) -> Engine:
        trainer = module.trainer
        is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
        # Training keeps the ranks in step. Evaluating, each has as many batches as it has, and none at all perhaps:
        # only where shards are gathered does one depend on another, and may wait for what rank 0 decides.
        steps_with_others = trainer.world_size > 1 and (self._is_fitting or is_sharded)
        if self._decided_for is None or self._decided_for() is not module:
            self._decisions, self._decisions_without_gradients, self._tuning, self._put_on = {}, {}, None, []
            self._decided_for = weakref.ref(module)
        engine = Engine(
            module,
            host,
            techniques,
            names=list(declarations()),
            strict=self.plan.strict,
            agree=trainer.strategy.broadcast if steps_with_others else None,
            gather=gather if steps_with_others else None,
            is_sharded=is_sharded,
            # What was tried without gradients does not hold with them: fitting decides for evaluating, not the reverse.
            decisions=self._decisions if self._is_fitting else self._decisions_without_gradients | self._decisions,
        )
        if self._is_fitting:
            self._memory_schedule = None
            self._decisions = engine.decisions
        else:
            self._decisions_without_gradients = engine.decisions
        return engine

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            check_optimizer(optimizer, self.precision)
        if self.scaler is not None:
            self.scaler.watch(optimizers)
        if self._engine is not None:
            self._engine.meet(optimizers)
        return super().connect(model, optimizers, lr_schedulers)

    # -- a step ------------------------------------------------------------------------------------------------

    @override
    def convert_input(self, data: Any) -> Any:
        if self._live is not None and self._live.turns.expects_batch:
            self._live.turns.batch(data)
        return super().convert_input(data)

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        step = self._step("train")
        return step if self.scaler is None else self._scaled(step, self.scaler)

    @override
    def val_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        if self._live is not None:
            self._live.turns.interrupt()
        return self._step("validate")

    @override
    def test_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._step("test")

    @override
    def predict_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._step("predict")

    def _step(self, stage: str) -> AbstractContextManager[None]:
        forward = self.forward_context()
        if self._engine is None:
            return forward
        # The validation that checks sanity before a fit must not decide for training.
        step = self._engine.step(stage, may_try=stage == "train" or not self._is_fitting)
        return step if isinstance(forward, nullcontext) else nested(forward, step)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        try:
            self._backward(tensor, model, optimizer, *args, **kwargs)
        except Exception as error:
            if self._memory is not None:
                self._memory.end(error, "backward pass")
            raise
        if self._memory is not None:
            self._memory.let_go()

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        try:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        except Exception as error:
            if self._memory is not None:
                self._memory.end(error, OPTIMIZER)
            raise

    def _backward(
        self, tensor: Tensor, model: LightningModule, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        net = self._net
        if net is None or not net.is_spread:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return

        def run(loss: Tensor = tensor) -> None:
            super(AccelPlugin, self).backward(loss, model, optimizer, *args, **kwargs)

        def run_repeated(outputs: Any) -> None:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            run(loss if self.scaler is None else self.scaler.scale(loss))

        def let_go() -> None:
            for loss in (tensor, None if self._unscaled is None else self._unscaled()):
                if loss is not None and loss.grad_fn is not None:
                    loss.detach_()

        net.backward(run, run_repeated, let_go)

    # -- checkpoints -------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        decisions = {
            technique: {site: list(asdict(verdict).values()) for site, verdict in verdicts.items()}
            for technique, verdicts in self._decisions.items()
        }
        state: dict[str, Any] = {"decisions": decisions} if decisions else {}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        put_on = self._put_on if self._memory is None or not self._is_fitting else self._memory.written
        if put_on:
            state["out_of_memory"] = put_on
        tuning = self._tuning if self._live is None else self._live.settled
        if tuning is not None:
            state["tuning"] = tuning.to_dict()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        decisions = {
            technique: {site: Verdict(*values) for site, values in verdicts.items()}
            for technique, verdicts in state_dict.get("decisions", {}).items()
        }
        self._put_on = [(name, settings) for name, settings in state_dict.get("out_of_memory", ())]
        if self._memory is not None and self._engine is not None:
            self._engine.decisions.update(decisions)
            self._memory.have(self._put_on if self._is_fitting else [])
        if self._engine is not None:
            self._engine.carry_out(decisions)
        if "tuning" in state_dict:
            self._tuning = Tuning.from_dict(state_dict["tuning"])
            if self._live is not None:
                self._live.resumed = self._tuning
        # The bare state of a scaler: what Lightning kept as "native_amp_scaling_state" before 1.6.
        scaler_state = state_dict if "scale" in state_dict else state_dict.get("scaler")
        if self.scaler is not None and scaler_state:
            self.scaler.load_state_dict(scaler_state)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._live is not None:
            self._live.turns.interrupt()
        if self.scaler is not None:
            # Where Lightning's own precision="16-mixed" looks for it.
            checkpoint[MixedPrecision.__qualname__] = self.scaler.state_dict()
        self._restore_layouts(checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(AccelPlugin.__qualname__)
        if state is None and checkpoint.get(MixedPrecision.__qualname__):
            state = {"scaler": checkpoint[MixedPrecision.__qualname__]}
        if state is not None:
            self.load_state_dict(state)

    # -- a run ends --------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        if self._memory is not None:
            self._put_on = self._memory.written if self._is_fitting else self._put_on
            self._memory.close()
            self._memory = None
        if self._live is not None:
            self._tuning, self._live = self._live.settled, None
        self._runs_in_float32 = False
        self._hooks.undo()
        self._hooks = PatchSet()
        if self._feeding is not None:
            self._feeding.close()
            self._feeding = None
        if self._loaders is not None:
            self._loaders.close()
            self._loaders = None
        if self.scaler is not None:
            self.scaler.forget()
        if self._engine is not None:
            self._engine.undo()
            self._net = None
            self._memory_schedule = self.memory_schedule
            self._engine = None

    # -- parts -------------------------------------------------------------------------------------------------

    def _is_in_force(self) -> bool:
        """Whether a step runs otherwise than the user wrote it: edited, or in a precision that we chose."""
        has_edits = self._engine is not None and self._engine.has_edits
        has_chosen = self.precision != "32-true" and self.plan.precision == "auto"
        return has_edits or (has_chosen and not self._runs_in_float32)

    def _yields(self, error: Exception) -> bool:
        return self._live is not None and self._live.yields(error)

    def _gives_up(self) -> None:
        if self._live is not None:
            self._live.give_up()

    def _interrupt(self) -> None:
        if self._live is not None:
            self._live.turns.interrupt()

    def _own_arms(self) -> list[Arm]:
        # float16 needs its scaler, and with it a step of another kind: that stays as the rules have it.
        if self.plan.precision != "auto" or self.precision != "bf16-mixed":
            return []
        return [Arm("precision", ("bf16-mixed",), self._have_precision)]

    def _have_precision(self, choice: str) -> None:
        self._runs_in_float32 = choice == OFF

    @contextmanager
    def _without_precision(self, error: Exception) -> Iterator[None]:
        """Repeats a step in float32, if another precision was our choice, and stays there if that was the cause."""
        if self.plan.precision != "auto" or self.precision == "32-true":
            yield
            return
        before, self._runs_in_float32 = self._runs_in_float32, True
        try:
            yield
        finally:
            self._runs_in_float32 = before
        if _NAMES_DTYPE.search(str(error)):
            self._set_precision("32-true")
            record = self._report.of("precision")
            record.is_on, record.status = False, f"32-true: {one_line(error)}"

    def _hook(self, patches: Iterable[Patch]) -> None:
        for patch in patches:
            self._hooks.add(patch)
        self._hooks.apply()

    def _passages(self, strategy: Strategy, engine: Engine) -> Iterator[Patch]:
        """The edits that have a strategy's batches, predictions and weights go through ``engine``."""
        for name, change in (
            ("batch_to_device", engine.batch),
            ("predict_step", engine.predictions),
            # Not left to `on_save_checkpoint`, which is not called for a checkpoint of weights only.
            ("lightning_module_state_dict", self._with_own_layouts),
        ):
            yield MethodPatch(name, "in the run's layouts", strategy, name, functools.partial(followed_by, change))

    def _with_own_layouts(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._restore_layouts(checkpoint := {"state_dict": state_dict})
        return checkpoint["state_dict"]

    def _restore_layouts(self, checkpoint: dict[str, Any]) -> None:
        """Brings the tensors of a checkpoint into the layouts that the user's own have."""
        memory_format = None if self._engine is None else self._engine.technique(MemoryFormat)
        if self._engine is not None and memory_format is not None:
            module = cast(LightningModule, self._engine.model)
            restore_layouts(checkpoint, module, module.trainer.optimizers, memory_format.strides())

    @override
    def __reduce__(self) -> Any:
        # Copies and other processes get the settings, the scaler and the decisions; a run in progress stays here.
        make, (kind, state) = super().__reduce__()
        state |= {"_engine": None, "_net": None, "_hooks": PatchSet(), "_feeding": None, "_decided_for": None}
        state |= {"_live": None, "_loaders": None, "_memory": None, "_unscaled": None, "_runs_in_float32": False}
        return make, (kind, state)

    def __repr__(self) -> str:
        defaults = vars(Plan())
        given = {n: value for n, value in vars(self.plan).items() if n == "precision" or value != defaults[n]}
        return f"AccelPlugin({', '.join(f'{name}={value!r}' for name, value in given.items())})"
