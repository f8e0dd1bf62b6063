"""The best checkpoint of a fit as a file that is served."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from typing_extensions import override

from lightning_accel.callbacks._announcements import say
from lightning_accel.core.checks import check_choice
from lightning_accel.core.device import device_of
from lightning_accel.core.module_copies import plain_copy
from lightning_accel.core.report import one_line
from lightning_accel.core.tree import map_tensors
from lightning_accel.deploy.combinations import FormName, Numbers, check_held
from lightning_accel.deploy.destination import default_path
from lightning_accel.deploy.exporting import Exported, export
from lightning_accel.deploy.forms import FORMS
from lightning_accel.deploy.inputs import arguments_of, example_in, on_device, shapes_in
from lightning_accel.deploy.quantizing import quantize
from lightning_accel.deploy.shapes import Dynamic
from lightning_accel.lightning.packages import Callback, LightningModule, Trainer


class ExportBest(Callback):
    """Exports what ``ModelCheckpoint`` has found best, at the end of a fit, beside the checkpoint.

    It is :func:`lightning_accel.deploy.export` of the module with the weights of that checkpoint: of several
    ``ModelCheckpoint`` the first that monitors; where none does the last checkpoint, and either is said. Where that
    cannot be done (no checkpoint, no example, a model that the form cannot hold), it is said, and the run ends as it
    would have.

    Args:
        form: ``"pt2"``, ``"aoti"``, ``"onnx"``, ``"tensorrt"``, ``"torchscript"`` or ``"openvino"``.
        example: What ``forward`` takes; by default the module's ``example_input_array``, else the inputs of the first
            training batch.
        dynamic: As of ``export``.
        precision: What the form holds: ``"fp16"``, ``"bf16"`` or INT8, as of ``quantize``.
        calibration: Batches by which smaller numbers are calibrated and tried, as of ``quantize``; ``"int8-static"``
            cannot do without.

    Attributes:
        exported: What the latest fit has written; None if it has written nothing.

    Raises:
        ValueError: There is no such form, it does not hold this precision, ``dynamic`` is something else, or ranges
            have no data to be taken from.
        MissingPackageError: The form needs what is not installed.
    """

    def __init__(
        self,
        form: FormName = "pt2",
        *,
        example: Any = None,
        dynamic: Dynamic = "auto",
        precision: Numbers = "32",
        calibration: Iterable[Any] | None = None,
    ) -> None:
        super().__init__()
        check_held(form, precision)
        check_choice("dynamic", dynamic, get_args(Dynamic))
        if precision == "int8-static" and calibration is None:
            raise ValueError("precision='int8-static' takes its ranges from data: calibration=loader.")
        # What the fit trains on is not known yet: asked is what does not hang on that.
        FORMS[form].require(torch.device("cuda" if form == "tensorrt" else "cpu"))
        self.exported: Exported | None = None
        self._form: FormName = form
        self._example, self._calibration = example, calibration
        self._seen: Any = None
        self._dynamic, self._precision = dynamic, precision

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.exported, self._seen = None, None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        is_given = self._example is not None or pl_module.example_input_array is not None
        if self._seen is None and not is_given and trainer.is_global_zero:
            self._seen = ()  # once: of a class that nobody else can make there is none, and the export says so
            with suppress(Exception):
                self._seen = map_tensors(lambda tensor: tensor.detach().cpu(), batch)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        try:
            self.exported = self._export(trainer, pl_module)
        except Exception as error:  # whatever it is: the run is worth more
            say(trainer, f"ExportBest(form={self._form!r}) has written nothing: {one_line(error)}")
        else:
            say(trainer, f"exported: {self.exported}")
        self._seen = None

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> Exported:
        best, remark = _best(trainer)
        if remark:
            say(trainer, f"ExportBest(form={self._form!r}): {remark}")
        model = plain_copy(pl_module, {id(trainer): object()})
        for module in model.modules():
            if isinstance(module, LightningModule):
                module.trainer = None
        # Written by this very run: nothing in it is a stranger's.
        checkpoint = torch.load(best, map_location="cpu", weights_only=False)
        model.load_state_dict(checkpoint["state_dict"], strict=pl_module.strict_loading)
        path = default_path(best, self._form, self._precision)
        if self._precision.startswith("int8"):
            model.cpu()
        example = self._example_for(pl_module, model)
        made = model if self._precision == "32" else quantize(model, self._precision, calibration=self._calibration)
        return export(made, example, self._form, path=path, dynamic=self._dynamic)

    def _example_for(self, pl_module: LightningModule, model: nn.Module) -> Any:
        if self._example is not None:
            return self._example
        if pl_module.example_input_array is not None:
            return pl_module.example_input_array
        try:
            example = on_device(example_in(model, self._seen), device_of(model))
            args, kwargs = arguments_of(model, example)
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"forward() does not take what was found in the first training batch, of {shapes_in(self._seen)}"
                f" ({one_line(error)}): give ExportBest(example=...) what it takes"
            ) from error
        return example


def _best(trainer: Trainer) -> tuple[Path, str]:
    """The checkpoint of a fit that is exported, and what is to be said of the choice, empty if there was none.

    Raises:
        FileNotFoundError: There is none in one file.
    """
    kept: list[tuple[Path, str]] = []
    last: list[Path] = []
    for keeper in trainer.checkpoint_callbacks:
        best, latest = (Path(str(getattr(keeper, name, "") or "")) for name in ("best_model_path", "last_model_path"))
        if (monitor := getattr(keeper, "monitor", None)) is not None and best.is_file():
            kept.append((best, monitor))
        last += [path for path in (best, latest) if path.is_file()]
    if kept:
        path, monitor = kept[0]
        others = ", ".join(f"{other} ({by})" for other, by in kept[1:])
        return path, f"{path} is exported, the best by {monitor}, and not {others}" if others else ""
    if not last:
        raise FileNotFoundError(
            "this fit has no best checkpoint in one file: it takes ModelCheckpoint(monitor=...), and weights that"
            " are not sharded; `lightning-accel export` does it afterwards"
        )
    path = max(last, key=lambda one: one.stat().st_mtime_ns)
    return path, f"no ModelCheckpoint monitors anything: {path}, the last, is exported"
