"""How a file is called: by the names that the model's forward has, in every form and precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.torch_private.recurrence import OPERATIONS, recurrence_whole
from lightning_accel.deploy import export, quantize

pytestmark = pytest.mark.numbers

NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",)}


class Scaled(nn.Module):
    """Takes names alone: (B, 8) → (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, *, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.layer(x)
        return y if scale is None else y * scale[:, None]


class Difference(nn.Module):
    """What two names tell apart."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q - 2 * k


def needs(form: str) -> None:
    for name in NEEDS.get(form, ()):
        pytest.importorskip(name)


@pytest.mark.parametrize(
    ("form", "precision"),
    [("pt2", "bf16"), ("torchscript", "32"), ("torchscript", "bf16"), ("onnx", "fp16"), ("openvino", "bf16")],
)
def test_keyword_arguments_go_by_their_names(form: str, precision: str) -> None:
    needs(form)
    model, x, scale = Scaled(), torch.randn(3, 8), torch.rand(3)
    exported = export(model, {"x": x, "scale": scale}, form, precision=precision)
    found = exported.load()(scale=scale, x=x)
    found = found[0] if isinstance(found, list) else found
    torch.testing.assert_close(found, model(x=x, scale=scale), rtol=0.05, atol=0.05)


def test_a_model_that_quantize_has_made_takes_keyword_arguments() -> None:
    x = torch.randn(3, 8)
    exported = export(quantize(Scaled(), "bf16"), {"x": x, "scale": torch.rand(3)})
    assert exported.dynamic == ("x: 0 (batch)", "scale: 0 (batch)")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on compiling
def test_a_compiled_model_keeps_the_names_of_its_inputs() -> None:
    model = torch.compile(Difference())
    assert export(model, (torch.randn(2, 3), torch.randn(2, 3))).dynamic == ("q: 0 (batch)", "k: 0 (batch)")


@pytest.mark.parametrize("form", ["pt2", "torchscript", "onnx", "openvino"])
def test_names_may_come_in_any_order(form: str) -> None:
    needs(form)
    q, k = torch.randn(2, 3), torch.randn(2, 3)
    call = export(Difference(), {"q": q, "k": k}, form).load()
    found = call(k=k, q=q)
    torch.testing.assert_close(found[0] if isinstance(found, list) else found, q - 2 * k)


@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_names_that_the_model_does_not_have_and_inputs_that_are_missing_are_errors(form: str) -> None:
    needs(form)
    q = torch.randn(2, 3)
    call = export(Difference(), (q, q), form).load()
    with pytest.raises(TypeError, match="no input is called z; k missing: the file takes q, k"):
        call(q, z=q)
    with pytest.raises(TypeError, match="k missing"):
        call(q)
    with pytest.raises(TypeError, match="q given twice"):
        call(q, q=q)
    with pytest.raises(TypeError, match="1 tensors too many"):
        call(q, q, q)


@pytest.mark.parametrize("form", ["pt2", "onnx", "openvino"])
@pytest.mark.parametrize("is_given", [True, False])
def test_an_argument_that_is_no_tensor_is_a_constant_of_the_file(form: str, is_given: bool) -> None:
    needs(form)

    class Times(nn.Module):
        def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
            return x * scale

    x, scale = torch.randn(3, 8), 3.0 if is_given else 2.0
    exported = export(Times(), (x, scale) if is_given else x, form)
    assert f"constant in the file: scale is {scale}" in str(exported)
    call = exported.load()
    found = call(x, scale) if is_given else call(x)
    torch.testing.assert_close(found[0] if isinstance(found, list) else found, x * scale)
    with pytest.raises(
        ValueError, match=f"scale=500.0: the file has scale={scale}, .* export the model with the other"
    ):
        call(x, 500.0)


class Outputs(NamedTuple):
    """Fields of a model's own."""

    mean: Tensor
    states: tuple[Tensor, Tensor]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("forward", "names"),
    [
        (lambda x: x.relu(), ["output_0"]),
        (lambda x: (x.sin(), [x.cos()]), ["output_0", "output_1_0"]),
        (lambda x: {"logits": x.sin(), "x": x.cos(), "sin": x.tan()}, ["logits", "output_x", "output_sin"]),
        (lambda x: Outputs(x.mean(-1), (x.sin(), x.cos())), ["mean", "states_0", "states_1"]),
        (lambda x: {"same": x, "sum": x.sum(-1), "again": x, "none": None}, ["same", "sum", "again"]),
    ],
)
def test_outputs_in_onnx_have_the_models_own_names(forward: Callable[[Tensor], Any], names: list[str]) -> None:
    needs("onnx")
    import onnx

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return forward(x)

    x = torch.randn(3, 8)
    exported = export(Model(), x, "onnx")
    graph = onnx.load(exported.path).graph
    assert [entry.name for entry in graph.output] == names
    assert len(exported.load()(x)) == len(names)


class Recurrent(nn.Module):
    """Tokens (B, T) → (B, T, 4)."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = kind(8, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.layers(self.embedding(tokens))[0]
        return self.head(found.reshape(-1, 32)).view(*tokens.shape, 4)


@pytest.mark.medium
@pytest.mark.parametrize("form", ["pt2", "onnx"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_model_takes_sequences_of_any_length(form: str, kind: type[nn.RNNBase]) -> None:
    needs(form)
    model = Recurrent(kind).eval()
    exported = export(model, torch.randint(11, (2, 6)), form)
    assert exported.dynamic == ("tokens: 0 (batch)", "tokens: 1 (sequence)")
    tokens = torch.randint(11, (3, 9))
    found = exported.load()(tokens)
    torch.testing.assert_close(found[0] if isinstance(found, list) else found, model(tokens))


def test_torchs_own_kernels_of_recurrence_are_back_after_an_error() -> None:
    def fails() -> None:
        with recurrence_whole():
            assert [{**one.py_kernels} for one in OPERATIONS] != before
            raise RuntimeError("inside")

    before = [{**one.py_kernels} for one in OPERATIONS]
    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert [{**one.py_kernels} for one in OPERATIONS] == before
