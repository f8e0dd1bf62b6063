"""INT8 in ONNX, by ONNX Runtime's quantiser, for the layers and ranges that ``quantize`` has chosen.

In a float file ``onnxruntime.quantization`` turns each layer into one kernel that also quantises the layer's inputs.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.int8 import is_converted
from lightning_accel.deploy.sessions import FileSession

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch's exporter stores a node's modules, followed by the node's own name."""


def quantize_file(path: Path, quantized: nn.Module, arguments: Arguments) -> None:
    """Converts layers of a file in place.

    Args:
        path: A float file written by torch.
        quantized: The same model, with the layers to convert in torch's INT8.
        arguments: An example, for a run that the library makes.
    """
    onnx, quantization = importlib.import_module("onnx"), importlib.import_module("onnxruntime.quantization")
    layers: dict[str | None, Any] = {
        name: one for name, one in quantized.named_modules(remove_duplicate=False) if is_converted(one)
    }
    file = onnx.load(path, load_external_data=False)
    graph = file.graph
    found = [(node, layer) for node in graph.node if (layer := layers.get(_module_of(node))) is not None]
    if not found:  # with no names, the library would convert all nodes
        return
    options: dict[str, Any] = {"per_channel": True, "nodes_to_quantize": [node.name for node, _ in found]}
    ranges = {node.input[0]: _range(layer.quant) for node, layer in found if hasattr(layer, "quant")}
    if not ranges:
        # Weights get 7 bits, since inputs use all 8: kernels for processors without VNNI add two products in 16 bits
        # and saturate (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html).
        # The library splits a Gemm into two nodes. The first has this name.
        options["nodes_to_quantize"] += ["_".join((node.name, "MatMul")) for node, _ in found]
        # It transposes a Gemm's weights, too. Release 1.23, the last for Python 3.10, keeps their recorded shapes.
        weights = {entry.name for entry in graph.initializer}
        recorded = [entry for entry in graph.value_info if entry.name not in weights]
        del graph.value_info[:]
        graph.value_info.extend(recorded)
        onnx.save(file, path)
        quantization.quantize_dynamic(path, path, reduce_range=True, **options)
        return
    ranges |= {node.output[0]: _range(layer.module) for node, layer in found if node.op_type == "Conv"}
    args, kwargs = arguments
    feeds = FileSession([entry.name for entry in graph.input], lambda _: []).feeds(*args, **kwargs)
    quantization.quantize_static(
        path,
        path,
        SimpleNamespace(get_next=iter([feeds, None]).__next__),
        activation_type=quantization.QuantType.QUInt8,
        # Outputs of products stay float: rounding them saves nothing.
        extra_options={"TensorQuantOverrides": ranges, "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
        **options,
    )


def _module_of(node: Any) -> str | None:
    """Returns the name of the layer whose product a node is; None if the node is no product.

    If the exporter has fused a convolution with later operations, only the weight shows the layer.
    """
    if node.op_type not in ("MatMul", "Gemm", "Conv"):
        return None
    if node.op_type == "Conv" and node.input[1].endswith("weight"):
        return str(node.input[1]).removesuffix("weight").removesuffix(".")
    scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
    names = ast.literal_eval(scopes)
    return names[-2] if len(names) > 1 else None


def _range(module: Any) -> list[dict[str, Any]]:
    scale, zero_point = np.float32(module.scale), np.uint8(module.zero_point)
    return [{"scale": np.array(scale), "zero_point": np.array(zero_point)}]
