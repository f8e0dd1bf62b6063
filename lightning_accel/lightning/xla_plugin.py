"""`AccelXLAPlugin`, for Lightning's XLA strategies, which accept no plugin but an :class:`XLAPrecision`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.core import xla
from lightning_accel.core.host import Host
from lightning_accel.experiment.store import xla_folder
from lightning_accel.lightning.added_logger import AddedLogger
from lightning_accel.lightning.met_programs import Program, RunState
from lightning_accel.lightning.packages import LightningModule, XLAPrecision, own
from lightning_accel.lightning.plugin_base import Reports
from lightning_accel.lightning.run import Run
from lightning_accel.lightning.trainer_plugin import TrainerPlugin
from lightning_accel.lightning.xla_compilations import Compilations
from lightning_accel.settings import Plan, without_answers
from lightning_accel.techniques.mixed_precision import Autocast, resolve_precision

_NO_TRIALS = "trust: a clock beside XLA times how it records a step, and a switch compiles anew: nothing is tried"
_NO_ANSWERS = (
    "memory.on_oom: XLA runs a step once it is recorded as a whole, and none can be repeated: where memory runs out,"
    " the run ends with XLA's error. Smaller batches, or torch_xla.utils.checkpoint, need less"
)


class AccelXLAPlugin(TrainerPlugin, Autocast, XLAPrecision):
    """Makes runs under XLA faster: ``Trainer(accelerator="tpu", plugins=[AccelXLAPlugin()])``.

    It takes the settings of a :class:`~lightning_accel.Plan`, as ``AccelPlugin`` does. The report says what XLA does
    itself and what is unavailable there. ``"bf16-mixed"`` is autocast to bfloat16. Optimizers use torch_xla's steps
    where these exist, and batches of text are padded before their transfer. Steps without an optimizer step
    (accumulation of gradients, validation, predictions) are executed one by one. Programs are kept for later runs if
    the device can read them, and compilations are counted by batch shape. Checkpoints are those of a plain Trainer.

    Attributes:
        plan: The settings.
        precision: The precision on the run's device; ``"32-true"`` until it is known.

    Raises:
        ModuleNotFoundError: torch_xla cannot be used.
        ValueError: A value is not allowed, such as ``precision="16-mixed"``.
    """

    @override
    def _configure(self, settings: dict[str, Any]) -> None:
        self.plan = Plan(**settings)
        if self.plan.of("precision") == "16-mixed":
            raise ValueError(
                "AccelXLAPlugin(precision='16-mixed'): float16 needs a gradient scaler, which would stop XLA at every"
                " step, and TPUs compute in bfloat16. Allowed: 'auto', '32-true', 'bf16-mixed'."
            )
        if why := xla.why_missing():
            raise ModuleNotFoundError(f"AccelXLAPlugin: {why}.")
        own(self, XLAPrecision).__init__(self, "32-true")
        Autocast.__init__(self, "32-true", "xla", is_chosen=False)
        self._compilations: Compilations | None = None
        self._reports = Reports()

    # -- a run starts ------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self.teardown()
        assert isinstance(module, LightningModule)
        strategy = module.trainer.strategy
        host = Host.detect(strategy.root_device)
        if host.kind != "xla":
            raise ValueError(
                f"AccelXLAPlugin with {type(strategy).__name__} on {strategy.root_device}: it is for"
                " SingleDeviceXLAStrategy and XLAStrategy. Elsewhere use AccelPlugin."
            )
        precision, reason = resolve_precision(self.plan.of("precision"), host)
        self.set_precision(precision)
        kept = xla.keep_programs(xla_folder())
        # XLA supports neither; below, a warning follows if the user asked for one by name.
        on_oom = self.plan.on_oom
        trust = "checked" if self.plan.trust == "measured" else self.plan.trust
        plan = self.plan.replace(trust=trust, memory=without_answers(self.plan.memory))
        self._run = Run(Program(module, host, plan, RunState()), self)
        report = self._run.engine.report
        self._reports.begin(report, is_fitting=self._run.is_fitting)
        report.of("precision").change("decided", f"{self.precision}: {reason}", is_on=self.precision != "32-true")
        if self.plan.trust == "measured":
            report.note(_NO_TRIALS)
        if on_oom == "split":
            self._run.engine.degrade(_NO_ANSWERS)
        elif on_oom != "off":
            report.note(_NO_ANSWERS)
        self._compilations = Compilations(strategy, report, kept)
        self._compilations.apply()
        self._run.start()
        if self._run.is_fitting:
            self._added_logger = AddedLogger.where_wanted(self.plan, module.trainer, module)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self._run is not None:
            self._run.engine.add_optimizers(optimizers)
        return super().connect(model, optimizers, lr_schedulers)

    # -- a step ------------------------------------------------------------------------------------------------

    @override
    def _step(self, stage: str) -> AbstractContextManager[None]:
        step = super()._step(stage)
        return step if stage == "train" else _ended(step)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if self._compilations is not None:
            self._compilations.is_recording = False  # XLAPrecision has ended the step
        return result

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._interrupt()

    # -- a run ends --------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        if self._compilations is not None:
            self._compilations.undo()
            self._compilations.close()
            self._compilations = None
        self._end_run()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Copies and other processes get the settings; a run in progress stays here.
        return vars(self) | dict.fromkeys(("_run", "_added_logger", "_compilations"))


@contextmanager
def _ended(step: AbstractContextManager[None]) -> Iterator[None]:
    """Wraps a step so that XLA executes it at its end, and not with later steps once a value is read."""
    with step:
        yield
    xla.end_step()
