"""The forms in which a model leaves Python: how each is written, and loaded again to see what it computes."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from typing_extensions import override

from lightning_accel.core.host import Host
from lightning_accel.core.patch import temporarily
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.torch_private.compilation import compile_to_package, load_package
from lightning_accel.core.torch_private.modules import registrations_unwatched_after
from lightning_accel.deploy.fused_attention import fuse_attention
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.int8 import MissingPackageError
from lightning_accel.deploy.int8_onnx import in_onnx
from lightning_accel.deploy.sessions import FileSession
from lightning_accel.deploy.shapes import Dimension, as_torch_wants
from lightning_accel.deploy.tracing import traced

Call = Callable[..., Any]


@dataclass(frozen=True)
class Captured:
    """A model that is to be written."""

    model: nn.Module = field(repr=False)  # plain, in eval mode
    arguments: Arguments  # an example
    dimensions: list[Dimension]  # which of the example's may change
    fuses_attention: bool  # whether the graph has attention as one operation that the model spells out

    @cached_property
    def program(self) -> ExportedProgram:
        """The model as a graph of torch's operations; captured once."""
        return self._captured[0]

    @property
    def has_fused(self) -> bool:
        """Whether the graph, once it was captured, has attention as one operation where the model has several."""
        return "_captured" in vars(self) and self._captured[1] > 0

    @cached_property
    def _captured(self) -> tuple[ExportedProgram, int]:
        shapes = as_torch_wants(self.model, self.arguments, self.dimensions)
        with registrations_unwatched_after():
            program = torch.export.export(self.model, *self.arguments, dynamic_shapes=shapes)
        return program, fuse_attention(program) if self.fuses_attention else 0


class ExportForm(ABC):
    """One form."""

    name: str  # as users write it
    ending: str  # of its file
    packages: tuple[str, ...] = ()  # what has to be installed, as modules
    install = ""  # the command that does
    has_graph = True  # whether it is made of `Captured.program`
    fuses_attention = True  # whether it has a kernel for attention as a whole
    needs_ending = False  # whether its library writes files with this ending only

    def check(self, device: torch.device) -> None:
        """Raises a MissingPackageError, with the mend, where this machine cannot make the form."""
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            raise MissingPackageError(
                f"form={self.name!r} needs {' and '.join(missing)}, not installed here: {self.install}"
            )

    def prepared(self, model: nn.Module) -> nn.Module:
        """What ``quantize`` has made, with layers in INT8 as this form has them; itself where there is no such form."""
        return model

    @abstractmethod
    def write(self, captured: Captured, path: Path) -> None:
        """Writes the model; what belongs to it may lie beside ``path``."""

    @abstractmethod
    def load(self, path: Path, device: torch.device) -> Call:
        """What was written, to be called as the model is."""


class Pt2(ExportForm):
    """Torch's own: a graph in a file, which any torch of this version or later runs, compiles or lowers."""

    name, ending, needs_ending = "pt2", ".pt2", True

    @override
    def write(self, captured: Captured, path: Path) -> None:
        torch.export.save(captured.program, path)

    @override
    def load(self, path: Path, device: torch.device) -> Call:
        return torch.export.load(path).module()


class Aoti(ExportForm):
    """Compiled ahead of time by TorchInductor for this kind of processor or GPU; runs without Python, from C++ too."""

    name, ending, needs_ending = "aoti", ".pt2", True

    @override
    def check(self, device: torch.device) -> None:
        if Host.detect(device).compiler is None:
            raise MissingPackageError("form='aoti' needs a compiler: `lightning-accel doctor` says what to install")

    @override
    def write(self, captured: Captured, path: Path) -> None:
        rank_zero_info("lightning-accel: form='aoti' is being compiled, which takes from half a minute to several")
        compile_to_package(captured.program, path)

    @override
    def load(self, path: Path, device: torch.device) -> Call:
        return load_package(path)


class TorchScript(ExportForm):
    """Traced and frozen; deprecated by torch; takes layers in INT8 as ``quantize`` makes them."""

    name, ending, has_graph = "torchscript", ".ts", False

    @override
    def write(self, captured: Captured, path: Path) -> None:
        torch.jit.save(traced(captured.model, captured.arguments), path)

    @override
    def load(self, path: Path, device: torch.device) -> Call:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):  # torch 2.15; this form was asked for by name
                warnings.simplefilter("ignore", kind)
            jit: Any = torch.jit
            loaded: Call = jit.load(path, map_location=device)
        return loaded


class Onnx(ExportForm):
    """For whatever reads ONNX; checked by ONNX Runtime, with CUDA or TensorRT where it has them."""

    name, ending = "onnx", ".onnx"
    packages, install = ("onnx", "onnxscript", "onnxruntime"), "pip install 'lightning-accel[deploy]'"
    fuses_attention = False  # torch's exporter takes it apart again, in more operations than people write

    @override
    def prepared(self, model: nn.Module) -> nn.Module:
        return in_onnx(model)

    @override
    def write(self, captured: Captured, path: Path) -> None:
        with temporarily(lambda: logging.root.manager.disable, logging.disable, logging.WARNING):
            written = torch.onnx.export(captured.program, dynamo=True, verbose=False)
        assert written is not None
        written.save(path)

    @override
    def load(self, path: Path, device: torch.device) -> Call:
        runtime = importlib.import_module("onnxruntime")
        wanted = ["TensorrtExecutionProvider", "CUDAExecutionProvider"] if device.type == "cuda" else []
        has = runtime.get_available_providers()
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors: its warnings are of its own graph
        options.intra_op_num_threads = torch.get_num_threads()
        providers = [*(one for one in wanted if one in has), "CPUExecutionProvider"]
        session = runtime.InferenceSession(str(path), options, providers=providers)
        return FileSession([entry.name for entry in session.get_inputs()], lambda feeds: session.run(None, feeds))


class OpenVino(ExportForm):
    """For OpenVINO, on Intel's processors and GPUs: an ``.xml`` and, beside it, a ``.bin``."""

    name, ending, needs_ending = "openvino", ".xml", True
    packages, install = ("openvino",), "pip install openvino"

    @override
    def write(self, captured: Captured, path: Path) -> None:
        # Unless it takes this for a test server, converting tells its maker of the model, over the network, unasked.
        with temporarily(lambda: os.environ.get("CI"), _set_ci, "true"):
            openvino = importlib.import_module("openvino")
            converted = openvino.convert_model(captured.program)
        for entry, node in zip(converted.inputs, user_inputs_of(captured.program), strict=True):
            if isinstance(node.meta.get("val"), Tensor):
                entry.tensor.set_names({node.name})  # it has numbers for the names of some
            else:
                converted.remove_parameter(entry.node)
        openvino.save_model(converted, path, compress_to_fp16=False)

    @override
    def load(self, path: Path, device: torch.device) -> Call:
        # Else it computes in bfloat16 wherever the processor does, whatever the file says.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = importlib.import_module("openvino").compile_model(path, "CPU", settings)

        def run(feeds: dict[str, Any]) -> list[Any]:
            found = compiled(feeds)
            return [found[output].copy() for output in compiled.outputs]

        return FileSession([entry.any_name for entry in compiled.inputs], run)


class TensorRT(ExportForm):
    """Engines for an NVIDIA GPU by Torch-TensorRT, in torch's own file; what TensorRT cannot do stays torch's."""

    name, ending = "tensorrt", ".ep"
    packages, install = ("torch_tensorrt",), "pip install 'lightning-accel[tensorrt]'"

    @override
    def check(self, device: torch.device) -> None:
        super().check(device)
        if device.type != "cuda":
            raise MissingPackageError("form='tensorrt' needs an NVIDIA GPU, and the model on it: model.cuda() before")

    @override
    def write(self, captured: Captured, path: Path) -> None:
        tensorrt = importlib.import_module("torch_tensorrt")
        args, kwargs = captured.arguments
        compiled = tensorrt.dynamo.compile(captured.program, arg_inputs=list(args), kwarg_inputs=kwargs)
        tensorrt.save(compiled, str(path), arg_inputs=list(args), kwarg_inputs=kwargs, retrace=False)

    @override
    def load(self, path: Path, device: torch.device) -> Call:
        importlib.import_module("torch_tensorrt")  # which registers what the file calls
        return torch.export.load(path).module()


FORMS: dict[str, ExportForm] = {
    form.name: form for form in (Pt2(), Aoti(), Onnx(), TensorRT(), TorchScript(), OpenVino())
}


def user_inputs_of(program: ExportedProgram) -> list[fx.Node]:
    """What the graph is called with, in its order, with what is no tensor."""
    kinds = [spec.kind.name for spec in program.graph_signature.input_specs]
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    return [node for node, kind in zip(nodes, kinds, strict=True) if kind == "USER_INPUT"]


def inputs_of(program: ExportedProgram) -> list[fx.Node]:
    """The inputs that are tensors, in their order."""
    return [node for node in user_inputs_of(program) if isinstance(node.meta.get("val"), Tensor)]


def _set_ci(value: str | None) -> None:
    if value is None:
        os.environ.pop("CI", None)
    else:
        os.environ["CI"] = value
