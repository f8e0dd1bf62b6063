"""The table of export forms: how each is written and loaded, and what it needs."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_accel.core.host import Host
from lightning_accel.core.patch import temporarily
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.torch_private.compilation import compile_to_package, load_package
from lightning_accel.core.torch_private.recurrence import recurrence_whole
from lightning_accel.deploy.captured import Captured, output_names_of, user_inputs_of
from lightning_accel.deploy.errors import MissingPackageError
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.int8 import without_deprecations
from lightning_accel.deploy.onnx_int8 import quantize_file
from lightning_accel.deploy.sessions import FileSession
from lightning_accel.deploy.shapes import Dimension, widened
from lightning_accel.deploy.tracing import traced

Call = Callable[..., Any]


@dataclass(frozen=True)
class ExportForm:
    """One row of the table."""

    name: str  # as users write it
    ending: str  # of its file name
    write: Callable[[Captured, Path], None]  # may write more files beside it
    load: Callable[[Path, torch.device], Call]  # returns a callable like the model
    needs: tuple[str, ...] = ()  # modules that must be installed
    install: str = ""  # the command that installs them
    check: Callable[[torch.device], str] = lambda device: ""  # what else this machine lacks, with advice
    has_graph: bool = True  # whether it is written from `Captured.program`
    fuses_attention: bool = True  # whether it has a kernel for fused attention
    keeps_recurrence: bool = False  # whether it has one for an LSTM or GRU of any length
    quantizes: bool = False  # whether it quantises a float model with its own INT8 kernels
    needs_ending: bool = False  # whether its library requires this ending

    def require(self, device: torch.device) -> None:
        """Raises a MissingPackageError, with advice, if this machine cannot make the form."""
        missing = [package for package in self.needs if importlib.util.find_spec(package) is None]
        why = f"needs {' and '.join(missing)}, not installed here: {self.install}" if missing else self.check(device)
        if why:
            raise MissingPackageError(f"form={self.name!r} {why}")

    def captured(
        self, model: nn.Module, arguments: Arguments, dimensions: list[Dimension], quantized: nn.Module | None = None
    ) -> Captured:
        """Returns a model ready to be written in this form."""
        example = widened(arguments, dimensions)
        return Captured(model, example, dimensions, self.fuses_attention, self.keeps_recurrence, quantized)


def _write_pt2(captured: Captured, path: Path) -> None:
    torch.export.save(captured.program, path)


def _load_pt2(path: Path, device: torch.device) -> Call:
    return torch.export.load(path).module()


def _write_aoti(captured: Captured, path: Path) -> None:
    rank_zero_info("lightning-accel: form='aoti' is being compiled, which takes from half a minute to several")
    compile_to_package(captured.program, path)


def _load_aoti(path: Path, device: torch.device) -> Call:
    return load_package(path)


def _check_compiler(device: torch.device) -> str:
    has_one = Host.detect(device).compiler is not None
    return "" if has_one else "needs a compiler: `lightning-accel doctor` says what to install"


def _write_torchscript(captured: Captured, path: Path) -> None:
    torch.jit.save(traced(captured.model, captured.arguments), path)


def _load_torchscript(path: Path, device: torch.device) -> Call:
    jit: Any = torch.jit
    with without_deprecations():  # torch 2.15; the user has chosen this form
        loaded: Call = jit.load(path, map_location=device)
    return loaded


def _write_onnx(captured: Captured, path: Path) -> None:
    with temporarily(lambda: logging.root.manager.disable, logging.disable, logging.WARNING), recurrence_whole():
        names = output_names_of(captured.program)
        written = torch.onnx.export(captured.program, dynamo=True, verbose=False, output_names=names)
        assert written is not None
        written.save(path)
        if captured.quantized is not None:
            quantize_file(path, captured.quantized, captured.arguments)


def _load_onnx(path: Path, device: torch.device) -> Call:
    runtime = importlib.import_module("onnxruntime")
    wanted = ["TensorrtExecutionProvider", "CUDAExecutionProvider"] if device.type == "cuda" else []
    has = runtime.get_available_providers()
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only: warnings concern its own graph
    options.intra_op_num_threads = torch.get_num_threads()
    providers = [*(one for one in wanted if one in has), "CPUExecutionProvider"]
    session = runtime.InferenceSession(str(path), options, providers=providers)
    return FileSession([entry.name for entry in session.get_inputs()], lambda feeds: session.run(None, feeds))


def _write_openvino(captured: Captured, path: Path) -> None:
    # Conversion reports the model to its maker over the network, without asking, unless on a test server (CI).
    with mock.patch.dict(os.environ, CI="true"):
        openvino = importlib.import_module("openvino")
        converted = openvino.convert_model(captured.program)
    for entry, node in zip(converted.inputs, user_inputs_of(captured.program), strict=True):
        if isinstance(node.meta.get("val"), Tensor):
            entry.tensor.set_names({node.name})  # some have numbers for names
        else:
            converted.remove_parameter(entry.node)
    openvino.save_model(converted, path, compress_to_fp16=False)


def _load_openvino(path: Path, device: torch.device) -> Call:
    # Otherwise it computes in bfloat16 if the processor can, whatever the file says.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = importlib.import_module("openvino").compile_model(path, "CPU", settings)

    def run(feeds: dict[str, Any]) -> list[Any]:
        found = compiled(feeds)
        return [found[output].copy() for output in compiled.outputs]

    return FileSession([entry.any_name for entry in compiled.inputs], run)


def _write_tensorrt(captured: Captured, path: Path) -> None:
    tensorrt = importlib.import_module("torch_tensorrt")
    args, kwargs = captured.arguments
    compiled = tensorrt.dynamo.compile(captured.program, arg_inputs=list(args), kwarg_inputs=kwargs)
    tensorrt.save(compiled, str(path), arg_inputs=list(args), kwarg_inputs=kwargs, retrace=False)


def _load_tensorrt(path: Path, device: torch.device) -> Call:
    importlib.import_module("torch_tensorrt")  # registers the operators of the file
    return _load_pt2(path, device)


def _check_gpu(device: torch.device) -> str:
    return "" if device.type == "cuda" else "needs an NVIDIA GPU, and the model on it: model.cuda() before"


FORMS: dict[str, ExportForm] = {
    form.name: form
    for form in (
        # Torch's own graph, which any torch of this version or later runs, compiles or lowers.
        ExportForm("pt2", ".pt2", _write_pt2, _load_pt2, keeps_recurrence=True, needs_ending=True),
        # Compiled by TorchInductor for this kind of processor or GPU; runs without Python, from C++ too.
        ExportForm("aoti", ".pt2", _write_aoti, _load_aoti, check=_check_compiler, needs_ending=True),
        # For any reader of ONNX; checked with ONNX Runtime, with CUDA or TensorRT if available.
        ExportForm(
            *("onnx", ".onnx", _write_onnx, _load_onnx),
            needs=("onnx", "onnxscript", "onnxruntime"),
            install="pip install 'lightning-accel[deploy]'",
            fuses_attention=False,  # torch's exporter splits it again, into more operations
            keeps_recurrence=True,
            quantizes=True,
        ),
        # Torch-TensorRT engines in torch's file; torch runs what TensorRT cannot.
        ExportForm(
            *("tensorrt", ".ep", _write_tensorrt, _load_tensorrt),
            needs=("torch_tensorrt",),
            install="pip install 'lightning-accel[tensorrt]'",
            check=_check_gpu,
        ),
        # Traced and frozen; deprecated by torch; supports the INT8 layers of `quantize`.
        ExportForm("torchscript", ".ts", _write_torchscript, _load_torchscript, has_graph=False),
        # On Intel's processors and GPUs: an .xml and, beside it, a .bin.
        ExportForm(
            *("openvino", ".xml", _write_openvino, _load_openvino),
            needs=("openvino",),
            install="pip install openvino",
            needs_ending=True,
        ),
    )
}
