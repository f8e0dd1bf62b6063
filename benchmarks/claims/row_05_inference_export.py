"""TensorRT (layer fusion, fp16) on matmul + bias + ReLU inference; here by every form that is installed.

Claimed: 4.2x
Holds: half precision and weights laid out for the kernels beforehand make the product itself faster
Holds when: fusing bias and ReLU saves little beside the product: what counts is whether a form computes in half
    precision, and lays the weights out for its kernels beforehand
No longer holds: PyTorch's own call already runs product and bias in one tuned kernel: fusing the ReLU too, and half
    precision, gain less than was claimed
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.claims.claim import Figure, Missing, NotHereError, Target, claim_in
from lightning_accel.claims.measure import device, speedup, timed_ms, without_gradients
from lightning_accel.core.host import Host
from lightning_accel.deploy import MissingPackageError, export
from lightning_accel.deploy.combinations import FormName
from lightning_accel.deploy.forms import FORMS

CLAIM = claim_in(__doc__, row=5)

BATCH, WIDTH = 128, 1024

Deployed = Callable[[Tensor], Tensor]


def measure() -> Iterator[Figure | Missing]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).eval().to(device())
    x = torch.randn(BATCH, WIDTH, device=device())
    half = torch.float16 if device().type == "cuda" else torch.bfloat16
    sides: dict[str, Callable[[], Any]] = {"eager": without_gradients(model, x)}
    for name, (deploy, dtypes) in forms(half).items():
        try:
            for dtype in dtypes:
                run = without_gradients(deployed(deploy, model, x, dtype), x.to(dtype))
                sides[f"deployed by {name} in {str(dtype).removeprefix('torch.')}"] = run
        except NotHereError as gap:
            yield Missing(f"deployed by {name}", str(gap))
    times = timed_ms(sides, seconds=6)
    for condition in list(sides)[1:]:
        yield speedup(condition, times["eager"], times[condition], Target("at least", 4.2))


@torch.no_grad()
def deployed(deploy: Callable[[nn.Module, Tensor], Deployed], model: nn.Module, x: Tensor, dtype: torch.dtype) -> Any:
    """``model`` in one form and precision, found to compute what ``model`` does."""
    torch._dynamo.reset()
    run = deploy(deepcopy(model).to(dtype), x.to(dtype))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(run(x.to(dtype)).float(), model(x), rtol=tolerance, atol=tolerance)
    return run


def forms(half: torch.dtype) -> dict[str, tuple[Callable[[nn.Module, Tensor], Deployed], tuple[torch.dtype, ...]]]:
    """Name → how to deploy a model in this form, and the precisions to do it in."""
    both = (torch.float32, half)
    return {
        "TorchScript": (partial(by_export, "torchscript"), both),
        "torch.compile": (by_compiling, both),
        "AOTInductor": (partial(by_export, "aoti"), both),
        "ONNX Runtime": (partial(by_export, "onnx"), (torch.float32,)),  # on a CPU it has no products in bfloat16
        "OpenVINO": (partial(by_export, "openvino"), (torch.float32,)),
        "TensorRT": (by_tensorrt, (torch.float16,)),
    }


def by_export(form: FormName, model: nn.Module, x: Tensor) -> Deployed:
    """Written by ``lightning_accel.deploy.export`` for inputs of this size, and loaded again."""
    if x.device.type != "cpu" and form in ("onnx", "openvino"):
        raise NotHereError("measured on a CPU only: on a GPU its copies from and to NumPy would be what is timed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            run = export(model, (x,), form, path=Path(folder, f"model{FORMS[form].ending}"), dynamic="off").load()
        except MissingPackageError as missing:
            raise NotHereError(str(missing)) from None
    for _ in range(3):  # TorchScript specialises on what it sees in the first calls
        found = run(x)
    return (lambda x: run(x)[0]) if isinstance(found, list) else run


def by_compiling(model: nn.Module, x: Tensor) -> Deployed:
    """Compiled at the first call, with weights as constants that may be laid out anew."""
    if Host.detect(device()).compiler is None:
        raise NotHereError("nothing to compile with: `lightning-accel doctor` names what to install")
    run: Deployed = torch.compile(model, options={"freezing": True})
    return run


def by_tensorrt(model: nn.Module, x: Tensor) -> Deployed:
    """Compiled by Torch-TensorRT; what TensorRT refuses is an error, not run by PyTorch unseen."""
    if x.device.type != "cuda":
        raise NotHereError("TensorRT needs an NVIDIA GPU")
    try:
        importlib.import_module("torch_tensorrt")
    except ImportError:
        raise NotHereError("torch_tensorrt is not installed: pip install 'lightning-accel[tensorrt]'") from None
    # It leaves models this small to PyTorch.
    options: dict[str, Any] = {"min_block_size": 1, "pass_through_build_failures": True}
    run: Deployed = torch.compile(model, backend="torch_tensorrt", dynamic=False, options=options)
    return run
