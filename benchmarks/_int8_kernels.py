"""The kernels that compute linear layers in INT8 on a CPU, each at work in a whole model."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

from lightning_accel.core.host import Host
from lightning_accel.deploy import export, int8, quantize
from lightning_accel.deploy.forms import FORMS
from lightning_accel.deploy.int8 import without_deprecations

Call = Callable[..., Any]
NO_COMPILER = "no compiler: `lightning-accel doctor` says what to install"


def kernels(model: nn.Module, example: Tensor, batches: list[Any], folder: Path) -> Iterator[tuple[str, Call | str]]:
    """Name → the model by these kernels, or why it cannot be had."""
    makers: dict[str, Callable[[], Call]] = {}
    for engine in torch.backends.quantized.supported_engines:
        if engine in ("fbgemm", "x86", "onednn"):
            makers[f"torch.ao, dynamic, {engine}"] = lambda engine=engine: _by_engine(engine, model)  # type: ignore[misc]
    makers |= {
        "torch.ao, dynamic, in TorchScript": lambda: _exported(model, "int8-dynamic", batches, "torchscript", folder),
        "torch.ao, static": lambda: quantize(model, "int8-static", calibration=batches).model,
        "torchao, dynamic": lambda: _by_torchao(model),
        "torchao, dynamic, compiled": lambda: _compiled(_by_torchao(model)),
        "PT2E, dynamic, compiled": lambda: _compiled(_by_pt2e(model, example, is_dynamic=True)),
        "PT2E, static, compiled": lambda: _compiled(_by_pt2e(model, example, is_dynamic=False)),
        "ONNX Runtime, dynamic, by `export`": lambda: _exported(model, "int8-dynamic", batches, "onnx", folder),
        "ONNX Runtime, static, by `export`": lambda: _exported(model, "int8-static", batches, "onnx", folder),
        "ONNX Runtime, by its `quantize_dynamic`": lambda: FORMS["onnx"].load(
            _by_runtime(model, example, folder), _CPU
        ),
        "OpenVINO, of the file before": lambda: FORMS["openvino"].load(folder / "runtime.onnx", _CPU),
    }
    for name, make in makers.items():
        try:
            with without_deprecations(), torch.no_grad(), torch._inductor.config.patch(freezing=True):
                call = make()
                call(example)  # compiles
            yield name, call
        except Exception as error:
            yield name, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


_CPU = torch.device("cpu")


def _by_engine(engine: str, model: nn.Module) -> Call:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        return quantize(model, "int8-dynamic").model
    finally:
        torch.backends.quantized.engine = before


def _exported(model: nn.Module, mode: Any, batches: list[Any], form: Any, folder: Path) -> Call:
    quantized = quantize(model, mode, calibration=batches)
    path = folder / f"{mode}{FORMS[form].ending}"
    return export(quantized, (batches[0][0],), form, path=path).load()


def _split(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    int8.prepare(copied)
    return copied


def _by_torchao(model: nn.Module) -> nn.Module:
    quantization = importlib.import_module("torchao.quantization")
    found = _split(model)
    quantization.quantize_(found, quantization.Int8DynamicActivationInt8WeightConfig())
    return found


def _by_pt2e(model: nn.Module, example: Tensor, *, is_dynamic: bool) -> nn.Module:
    steps = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic))
    prepared = steps.prepare_pt2e(torch.export.export(_split(model), (example,)).module(), quantizer)
    prepared(example)
    found: nn.Module = steps.convert_pt2e(prepared)
    return found


def _compiled(model: nn.Module) -> Call:
    if Host.detect(_CPU).compiler is None:
        raise RuntimeError(NO_COMPILER)
    torch._dynamo.reset()
    found: Call = torch.compile(model)
    return found


def _by_runtime(model: nn.Module, example: Tensor, folder: Path) -> Path:
    quantization = importlib.import_module("onnxruntime.quantization")
    written = export(model, (example,), "onnx", path=folder / "float.onnx").path
    path = folder / "runtime.onnx"
    logging.disable(logging.WARNING)  # it advises to do at length what is not wanted here
    try:
        quantization.quantize_dynamic(written, path, per_channel=True)
    finally:
        logging.disable(logging.NOTSET)
    return path
