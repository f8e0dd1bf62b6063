"""A form's loss of accuracy and its confidence interval, by torchmetrics, with the same resamples for all forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers import BootStrapper

from lightning_accel.core.device import device_of
from lightning_accel.core.random_streams import seed_streams
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy.inputs import arguments_of, inputs_and_targets, on_device, shapes_in
from lightning_accel.deploy.losses import compared, loss

RESAMPLES = 100
_BOUNDS = torch.tensor([0.025, 0.975])


@dataclass(frozen=True)
class Score:
    """The value of one metric for one form."""

    value: float  # on the data itself
    low: float  # of its 95% interval, over bootstrap samples
    high: float
    drop: float  # by how much it is worse than the original; negative if it is better
    drop_low: float  # of the interval of the drop, with the same samples for both
    drop_high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Judged:
    """A form's metrics and outputs on the data."""

    scores: Mapping[str, tuple[float, Tensor]]  # metric → (value on the data, values on bootstrap samples)
    outputs: list[list[Tensor]]  # for each batch


def named(metrics: Metric | Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Returns metrics by name: a single one by its class. Raises a TypeError for anything else."""
    if metrics is None:
        return {}
    found = dict(metrics) if isinstance(metrics, Mapping) else {type(metrics).__name__: metrics}
    for name, metric in found.items():
        if not isinstance(metric, Metric):
            raise TypeError(
                f"metrics: {name!r} is {metric!r}. Give a metric of torchmetrics, MulticlassAccuracy(10) say, or a"
                " mapping of names to several."
            )
    return found


def judge(call: Callable[..., Any], model: nn.Module, batches: Iterable[Any], metrics: Mapping[str, Metric]) -> Judged:
    """Runs a form over the data.

    Raises:
        ValueError: A batch has no targets, or a metric cannot be computed from the model's outputs.
    """
    device = device_of(model)
    plain = {name: metric.clone().to(device) for name, metric in metrics.items()}
    options: Any = {"num_bootstraps": RESAMPLES, "raw": True, "mean": False, "std": False}
    drawn = {name: BootStrapper(metric.clone(), **options).to(device) for name, metric in metrics.items()}
    outputs = []
    with torch.no_grad(), StateSnapshot(None, Level.RANDOM, device):
        seed_streams(0, device)  # the same samples for every form
        for batch in batches:
            inputs, targets = on_device(inputs_and_targets(model, batch), device)
            args, kwargs = arguments_of(model, inputs)
            found = [one.to(device) for one in tensors_in(call(*args, **kwargs))]
            outputs.append(compared(found))
            for name in metrics:
                _update(name, plain[name], drawn[name], found[0], targets)
    scores = {name: (_number(name, plain[name].compute()), drawn[name].compute()["raw"].cpu()) for name in metrics}
    return Judged(scores, outputs)


def scores_of(form: Judged, original: Judged, metrics: Mapping[str, Metric]) -> dict[str, Score]:
    """Returns metric → a form's score, compared with the original."""
    found = {}
    for name, metric in metrics.items():
        (value, values), (expected, expected_values) = form.scores[name], original.scores[name]
        sign = -1.0 if metric.higher_is_better is False else 1.0
        low, high = torch.quantile(values.float(), _BOUNDS).tolist()
        least, most = torch.quantile(sign * (expected_values - values).float(), _BOUNDS).tolist()
        found[name] = Score(value, low, high, sign * (expected - value), least, most)
    return found


def error_of(form: Judged, original: Judged) -> float:
    """Returns the error of a form's outputs (:func:`lightning_accel.deploy.losses.loss`) on the worst batch."""
    pairs = zip(form.outputs, original.outputs, strict=True)
    return max((loss(got, want) for got, want in pairs), default=0.0)


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"metric {name!r} comes to {value!r}: give one of a single number, with average='macro' say.")
    return float(value)


def _update(name: str, metric: Metric, drawn: BootStrapper, outputs: Tensor, targets: Any) -> None:
    if targets is None:
        raise ValueError(f"metric {name!r} needs targets: give a loader of (inputs, targets), or no metrics.")
    try:
        metric.update(outputs, targets)
        drawn.update(outputs, targets)
    except Exception as error:
        raise ValueError(
            f"metric {name!r} cannot take what the model returns, {shapes_in(outputs)}, with targets of"
            f" {shapes_in(targets)}: {error}"
        ) from error
