"""Models in the forms in which they are served, by `quantize`, `export` and `compare`; and INT8 by all its kernels.

    python benchmarks/deploying.py [--seconds 4] [--dry-run] [--json docs/results]

To answer: whether INT8 halves the latency at batch 1 and quarters the size of a transformer encoder that has learnt
real data, for under a point of accuracy; whether a form makes the demo's models 1.3 times as fast at batch 1; and by
which kernels INT8 is the fastest. Training the encoder takes most of the time. What is not installed is said.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from _int8_kernels import kernels
from _measure import publish
from _served_models import accuracy, demo_models, trained_encoder
from _served_rows import COLUMNS, rows_of, without_folders
from torch import Tensor, nn

from lightning_accel.deploy import compare_forms, form_latency
from lightning_accel.experiment.tolerance import deviation

SECONDS = 4.0
EPOCHS = 10, 4  # with merged patches, and with all
ENCODER = "ViT of BERT-small's sizes, 64 patches"
ENCODER_FORMS = (
    *("int8-dynamic", "int8-static", "bf16", "torchscript", "torchscript+int8-dynamic"),
    *("onnx", "onnx+int8-dynamic", "onnx+int8-static", "openvino", "aoti"),
)
DEMO_FORMS = ("int8-dynamic", "bf16", "torchscript", "onnx", "openvino", "aoti", "aoti+bf16")
KERNELS = ("INT8 by", "p50, ms", "speed", "error")


def by_kernels(model: nn.Module, batches: list[Any], seconds: float) -> tuple[list[list[str]], dict[str, Any]]:
    """The encoder at batch 1, in INT8 by all kernels that are here."""
    example: Tensor = batches[0][0][:1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = dict(kernels(model, example, batches, Path(folder)))
        calls: dict[str, Any] = {"float32, eager": model}
        calls |= {name: call for name, call in made.items() if not isinstance(call, str)}
        spent = form_latency.timed(calls, ((example,), {}), seconds * len(calls), torch.device("cpu"))
        rows, details = [], {}
        expected = _outputs(model, batches)
        for name, call in calls.items():
            p50, speed = (
                form_latency.latency_of(spent[name]).p50,
                form_latency.speedup_of(spent["float32, eager"], spent[name]),
            )
            error = deviation([_outputs(call, batches)], [expected]).noise
            rows.append([name, f"{p50:.3g}", str(speed) if call is not model else "", f"{error:.1e}"])
            details[name] = {"p50_ms": p50, "speed": [speed.ratio, speed.low, speed.high], "error": error}
    rows += [[name, without_folders(why), "", ""] for name, why in made.items() if isinstance(why, str)]
    return rows, details


@torch.no_grad()
def _outputs(call: Any, batches: list[Any]) -> Tensor:
    """Image by image: some are compiled for a batch of 1."""
    found = [call(image[None]) for image in batches[0][0]]
    return torch.cat([one[0] if isinstance(one, list) else one for one in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timing, for each form and size of batch")
    parser.add_argument("--dry-run", action="store_true", help="everything small and once, for no figures")
    options = parser.parse_known_args()[0]
    small, seconds = options.dry_run, 0.01 if options.dry_run else options.seconds
    sizes = {"width": 32, "layers": 1, "heads": 2} if small else {}
    encoder, testing = trained_encoder(*((1, 1) if small else EPOCHS), **sizes)
    encoder_forms, demo_forms = (
        [name for name in names if not small or not name.startswith(("aoti", "openvino"))]
        for names in (ENCODER_FORMS, DEMO_FORMS)
    )
    found = {ENCODER: compare_forms(encoder, encoder_forms, testing, accuracy(), batch_sizes=(1,), seconds=seconds)}
    for name, (model, batches) in demo_models(small).items():
        found[name] = compare_forms(model, demo_forms, batches, batch_sizes=(1,), seconds=seconds)
    command = "python benchmarks/deploying.py" + (f" --seconds {seconds:g}" if seconds != SECONDS else "")
    rows = [one for name, comparison in found.items() for one in rows_of(name, comparison)]
    details = {name: comparison.to_dict()["forms"] for name, comparison in found.items()}
    publish("deploying", command, COLUMNS, rows, details, by_machine=True)
    if not small:
        publish("deploying_int8", command, KERNELS, *by_kernels(encoder, testing, seconds), by_machine=True)


if __name__ == "__main__":
    main()
