"""The best checkpoint of a fit as a file that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_accel.callbacks._saying import say
from lightning_accel.core.tree import map_tensors
from lightning_accel.core.trial import one_line
from lightning_accel.deploy.combinations import FormName, Precision, check_held
from lightning_accel.deploy.exporting import Exported, export
from lightning_accel.deploy.forms import FORMS
from lightning_accel.deploy.inputs import example_in
from lightning_accel.deploy.plain import plain_copy
from lightning_accel.deploy.shapes import Dynamic


class ExportBest(Callback):
    """Exports what ``ModelCheckpoint`` has found best, at the end of a fit, beside the checkpoint.

    It is :func:`lightning_accel.deploy.export` of the module with the weights of that checkpoint. Where that cannot be
    done (no checkpoint, no example, a model that the form cannot hold), it is said, and the run ends as it would have.

    Args:
        form: ``"pt2"``, ``"aoti"``, ``"onnx"``, ``"tensorrt"``, ``"torchscript"`` or ``"openvino"``.
        example: What ``forward`` takes; by default the module's ``example_input_array``, else the inputs of the first
            training batch.
        dynamic: As of ``export``.
        precision: As of ``export``.

    Attributes:
        exported: What the latest fit has written; None: nothing.

    Raises:
        ValueError: There is no such form, or it does not hold this precision.
    """

    def __init__(
        self, form: FormName = "pt2", *, example: Any = None, dynamic: Dynamic = "auto", precision: Precision = "32"
    ) -> None:
        super().__init__()
        check_held(form, precision)
        self.exported: Exported | None = None
        self._form: FormName = form
        self._example = example
        self._seen: Any = None
        self._dynamic, self._precision = dynamic, precision

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.exported, self._seen = None, None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._seen is None and trainer.is_global_zero:
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
        keeper = trainer.checkpoint_callback
        best = Path(str(getattr(keeper, "best_model_path", "") or ""))
        if not best.is_file():
            raise FileNotFoundError(
                "this fit has no best checkpoint in one file: it takes ModelCheckpoint(monitor=...), and weights that"
                " are not sharded; `lightning-accel export` does it afterwards"
            )
        model = plain_copy(pl_module, {id(trainer): object()})
        for module in model.modules():
            if isinstance(module, LightningModule):
                module.trainer = None
        # Written by this very run: nothing in it is a stranger's.
        checkpoint = torch.load(best, map_location="cpu", weights_only=False)
        model.load_state_dict(checkpoint["state_dict"])
        path = best.with_suffix(FORMS[self._form].ending)
        example = self._example_for(pl_module)
        return export(model, example, self._form, path=path, dynamic=self._dynamic, precision=self._precision)

    def _example_for(self, pl_module: LightningModule) -> Any:
        if self._example is not None:
            return self._example
        return (
            pl_module.example_input_array
            if pl_module.example_input_array is not None
            else example_in(pl_module, self._seen)
        )
