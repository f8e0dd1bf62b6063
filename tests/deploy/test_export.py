"""Models as files that are served: the same numbers at several sizes, whole or not at all, errors with the line."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.deploy import (
    DynamicDimensionError,
    ExportError,
    MissingPackageError,
    compare_forms,
    export,
    quantize,
)
from lightning_accel.deploy.agreement import differs
from lightning_accel.deploy.combinations import HOLDS, Mode
from lightning_accel.deploy.onnx_int8 import quantize_file
from support.models import TASKS, TEXT, TinyCNN

pytestmark = pytest.mark.numbers

QUICK = ["pt2", "torchscript"]


class Positions(nn.Module):
    """Adds a table of positions as long as the sequences that it was trained on: tokens (B, 6) → (B, 6, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) + self.positions)


class Gate(nn.Module):
    """Decides by the numbers which way to go."""

    def forward(self, x: Tensor) -> Tensor:
        if x[:, 0].sum() > 0:
            return x
        return 2 * x


class Share(nn.Module):
    """Divides by the batch's size."""

    def forward(self, x: Tensor) -> Tensor:
        return x / float(x.shape[0])


class Gated(nn.Module):
    """Gated features, (B, 8) → (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), Gate())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def needs_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="pip install 'lightning-accel[deploy]'")


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{Path(__file__).name}:{lines.index(text) + 1}"


def bytes_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.medium
@pytest.mark.parametrize("form", QUICK)
@pytest.mark.parametrize("task", TASKS)
def test_a_form_computes_the_same_for_other_batches_and_sequences(form: str, task: str) -> None:
    model, (inputs, _) = TASKS[task].model().eval(), TASKS[task].batch()
    exported = export(model, inputs, form)
    assert exported.path.exists()
    assert len(exported.checked) == (3 if task == "cnn" else 5)
    more = torch.cat([inputs, inputs, inputs])
    with torch.no_grad():
        torch.testing.assert_close(exported.load()(more), model(more), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_onnx_computes_the_same_under_onnx_runtime() -> None:
    needs_onnx()
    model, (inputs, _) = TASKS["transformer"].model().eval(), TASKS["transformer"].batch()
    exported = export(model, inputs, "onnx", path="served/text.onnx")
    assert exported.dynamic == ("tokens: 0 (batch)", "tokens: 1 (sequence)")
    (found,) = exported.load()(inputs[:1, :3])
    with torch.no_grad():
        torch.testing.assert_close(found, model(inputs[:1, :3]), rtol=1e-4, atol=1e-5)
    assert [one.name for one in Path("served").iterdir()] == ["text.onnx"]


@pytest.mark.slow
def test_a_package_compiled_ahead_of_time_computes_the_same() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    exported = export(model, torch.randn(1, 8), "aoti")
    with torch.no_grad():
        x = torch.randn(5, 8)
        torch.testing.assert_close(exported.load()(x), model(x))


def test_a_lightning_module_is_traced_without_a_trainer() -> None:
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model, x = Plain().eval(), torch.randn(2, 8)
    exported = export(model, x, "torchscript")
    with torch.no_grad():
        torch.testing.assert_close(exported.load()(x), model(x))


@pytest.mark.medium
def test_a_mapping_is_the_one_argument_where_forward_has_no_such_names() -> None:
    model, (inputs, _) = TEXT.model(), TEXT.batch()
    inputs.pop("labels")
    exported = export(model, inputs)
    assert exported.fixed == {}
    assert exported.load()(inputs).shape == (16, 17, 96)


@pytest.mark.medium
def test_what_is_accelerated_is_exported_as_its_author_wrote_it() -> None:
    task = TASKS["transformer"]
    model = task.model()
    handle = accelerate(model, Plan(precision="32-true", memory={"checkpoint": "full"}, trust="checked"))
    inputs, targets = task.batch()
    with handle.step():
        task.loss(model(handle.batch(inputs)), targets).backward()
    edited = {name for name, module in model.named_modules() if "forward" in vars(module)}
    exported = export(model, inputs)
    assert edited == {name for name, module in model.named_modules() if "forward" in vars(module)} != set()
    handle.undo()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(exported.load()(inputs), model(inputs), rtol=1e-4, atol=1e-5)


def test_a_dimension_that_the_model_fixes_is_said_to_be_fixed() -> None:
    exported = export(Positions(), torch.randint(11, (1, 6)))
    assert exported.dynamic == ("tokens: 0 (batch)",)
    assert exported.fixed == {"tokens: 1 (sequence)": 6}
    assert "fixed by the model: tokens: 1 (sequence) is 6" in str(exported)


def test_a_dimension_that_was_asked_for_and_is_fixed_is_an_error() -> None:
    with pytest.raises(DynamicDimensionError, match=r"fixes tokens: 1 \(sequence\) is 6: a table of positions"):
        export(Positions(), torch.randint(11, (1, 6)), dynamic="batch+sequence")
    assert list(Path().iterdir()) == []


def test_control_flow_on_data_names_the_line_of_the_model() -> None:
    with pytest.raises(ExportError) as caught:
        export(Gated(), torch.randn(4, 8))
    assert line_of("        if x[:, 0].sum() > 0:") in str(caught.value)
    assert "its control flow depends on data" in str(caught.value)
    assert list(Path().iterdir()) == []


def test_a_form_whose_numbers_are_off_is_kept_out_and_the_module_named_where_that_begins() -> None:
    """Tracing holds on to a size that Python has computed with."""
    model = Gated()
    model.body[1] = Share()
    with pytest.raises(ExportError, match=r"computes other numbers than the original.*It begins in 'body\.1', Share\."):
        export(model, torch.randn(3, 8), "torchscript")
    assert list(Path().iterdir()) == []


@pytest.mark.medium
def test_an_operator_that_onnx_lacks_names_the_line_of_the_model() -> None:
    needs_onnx()

    class Bessel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    with pytest.raises(ExportError, match=r"No ONNX function found for .*bessel_j0") as caught:
        export(Bessel(), torch.randn(4, 8), "onnx")
    assert line_of("            return torch.special.bessel_j0(x)") in str(caught.value)


@pytest.mark.medium
@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_half_precision_takes_and_returns_float32(precision: str) -> None:
    model, x = TinyCNN(channels=64).eval(), torch.randn(3, 3, 8, 8)
    exported = export(model, x, precision=precision)
    found = exported.load()(x)
    assert found.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(found, model(x), rtol=0.1, atol=0.1)
    assert exported.num_bytes < bytes_of(model)


def test_layers_in_int8_are_written_by_the_forms_that_hold_them() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    quantized = quantize(model, "int8-dynamic")
    exported = export(quantized, torch.randn(4, 64), "torchscript")
    assert exported.precision == "int8-dynamic"
    assert "model.int8-dynamic.ts: torchscript+int8-dynamic, " in str(exported)
    with pytest.raises(ExportError, match=r"Export what quantize\(\) has returned, .* as 'onnx' or 'torchscript'"):
        export(quantized.model, torch.randn(4, 64), "pt2")


@pytest.mark.medium
@pytest.mark.parametrize("form", [form for form, held in HOLDS.items() for numbers in held if numbers == "int8-weight"])
def test_weights_alone_in_int8_make_a_file_of_a_third_of_the_size(form: str) -> None:
    if form == "onnx":
        needs_onnx()
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval(), torch.randn(2, 256)
    assert export(quantize(model, "int8-weight"), x, form).num_bytes < 0.4 * bytes_of(model)


@pytest.mark.parametrize(
    ("form", "mode"), [(form, mode) for form, held in HOLDS.items() for mode in get_args(Mode) if mode not in held]
)
def test_a_form_that_does_not_hold_these_numbers_is_an_error_that_says_which_do(form: str, mode: str) -> None:
    model, x = nn.Linear(8, 4), torch.randn(2, 8)
    made = quantize(model, mode, calibration=[x])
    message = rf"form='{form}' is not written with precision='{mode}'. It is with 32, .*; {mode} is written as \w+"
    with pytest.raises(ValueError, match=message):
        export(made, x, form)
    with pytest.raises(ValueError, match=message):
        compare_forms(model, [f"{form}+{mode}"], [x])


def test_the_page_has_the_table_of_what_each_form_holds() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "deploying.md").read_text(encoding="utf-8")
    for form, held in HOLDS.items():
        (row,) = [line.split(" | ") for line in page.splitlines() if line.startswith(f"| `{form}` | ")]
        assert row[2] == ", ".join(f"`{numbers}`" for numbers in held[1:])


def test_a_model_that_is_quantised_has_its_precision() -> None:
    with pytest.raises(ValueError, match=r"precision='bf16' of a model that quantize\(\) has made int8-dynamic: leave"):
        export(quantize(nn.Linear(8, 4), "int8-dynamic"), torch.randn(2, 8), "torchscript", precision="bf16")


@pytest.mark.medium
def test_an_operator_without_a_kernel_in_these_numbers_is_an_error_and_nothing_is_written() -> None:
    """ONNX Runtime has no transposed convolution in float64 for a CPU: it fails on loading what it could check."""
    needs_onnx()
    with pytest.raises(ExportError, match=r"form='onnx' cannot load what it has written: .*ConvTranspose"):
        export(nn.ConvTranspose2d(3, 4, 3).double(), torch.randn(2, 3, 8, 8).double(), "onnx")
    assert list(Path().iterdir()) == []


@pytest.mark.medium
def test_int8_in_onnx_has_one_kernel_for_each_layer_and_a_quarter_of_the_size() -> None:
    """ONNX Runtime quantises inputs, multiplies and adds the bias in one: what it makes of the graph is looked at."""
    needs_onnx()
    import onnx
    import onnxruntime

    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval()
    exported = export(quantize(model, "int8-dynamic"), torch.randn(2, 256), "onnx")
    assert exported.num_bytes < 0.3 * bytes_of(model)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = "kernels.onnx", 3
    onnxruntime.InferenceSession(str(exported.path), options, providers=["CPUExecutionProvider"])
    kernels = [node.op_type for node in onnx.load("kernels.onnx").graph.node]
    assert kernels == ["DynamicQuantizeMatMul", "Gelu", "DynamicQuantizeMatMul"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mode", "task"), [("int8-static", "cnn"), pytest.param("int8-dynamic", "transformer", marks=pytest.mark.slow)]
)
def test_int8_in_onnx_is_as_near_to_the_model_in_float_as_quantize_is(mode: str, task: str) -> None:
    needs_onnx()
    model, (inputs, _) = TASKS[task].model().eval(), TASKS[task].batch()
    quantized = quantize(model, mode, calibration=[inputs])
    exported = export(quantized, inputs, "onnx")
    with torch.no_grad():
        expected = model(inputs)
        (found,) = exported.load()(inputs)
    assert (found - expected).norm() / expected.norm() < 2.5 * quantized.error
    assert quantized.error > 0


@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (0.5, False)])
def test_a_bit_less_of_the_weights_is_not_taken_for_a_fault(scale: float, is_right: bool) -> None:
    """On inputs that need no rounding the weights alone lose: with seven bits by chance several times as much."""
    x, ratios = torch.ones(4, 64), []
    for _ in range(20):
        model = nn.Linear(64, 16).eval().requires_grad_(False)
        step = model.weight.abs().amax(1, keepdim=True) / 63.5
        rounded = scale * step * (model.weight / step).round()
        quantized = quantize(model, "int8-dynamic")

        def in_seven_bits(x: Tensor, rounded: Tensor = rounded, bias: Tensor = model.bias) -> Tensor:
            return nn.functional.linear(x, rounded, bias)

        expected = model(x)
        ratios.append((in_seven_bits(x) - expected).norm() / (quantized.model(x) - expected).norm())
        failure, _ = differs(model, in_seven_bits, [((x,), {})], quantized.model)
        assert (failure == "") is is_right
    assert max(ratios) > 2


@pytest.mark.slow
def test_int8_that_is_off_in_onnx_is_kept_out_and_the_layer_named_where_that_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a kernel does that saturates: of one layer the products come out half as large."""
    needs_onnx()
    import onnx

    from lightning_accel.deploy import forms

    def saturating(path: Path, quantized: nn.Module, arguments: Any) -> None:
        quantize_file(path, quantized, arguments)
        model = onnx.load(path)
        for tensor in model.graph.initializer:
            if tensor.name.endswith("_quantized") and list(tensor.dims) == [32, 48]:
                tensor.raw_data = (onnx.numpy_helper.to_array(tensor) // 2).tobytes()
        onnx.save(model, path)

    monkeypatch.setattr(forms, "quantize_file", saturating)
    model = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.GELU(), nn.Linear(32, 48)), nn.Linear(48, 8)).eval()
    with pytest.raises(ExportError, match=r"relative error .* to the model in float.* It begins in '1\.1', Linear"):
        export(quantize(model, "int8-dynamic"), torch.randn(4, 64), "onnx")
    assert list(Path().iterdir()) == []


def test_openvino_computes_the_same_in_float32() -> None:
    """By itself it computes in bfloat16 on processors that do."""
    pytest.importorskip("openvino", reason="pip install openvino")
    model, (inputs, _) = TASKS["transformer"].model().eval(), TASKS["transformer"].batch()
    exported = export(model, inputs, "openvino", path="served/text.xml")
    assert exported.dynamic == ("tokens: 0 (batch)", "tokens: 1 (sequence)")
    (found,) = exported.load()(inputs[:1, :3])
    with torch.no_grad():
        torch.testing.assert_close(found, model(inputs[:1, :3]), rtol=1e-4, atol=1e-5)
    assert sorted(one.name for one in Path("served").iterdir()) == ["text.bin", "text.xml"]


def test_what_was_there_stays_where_the_new_one_cannot_be_written() -> None:
    Path("model.pt2").write_text("the previous one")
    with pytest.raises(ExportError):
        export(Gated(), torch.randn(4, 8))
    assert Path("model.pt2").read_text() == "the previous one"


def test_a_path_that_cannot_be_written_is_an_error_before_anything_is_exported() -> None:
    Path("file").write_text("")
    with pytest.raises(OSError, match="file"):
        export(nn.Linear(2, 2), torch.randn(2, 2), path="file/model.pt2")
    with pytest.raises(IsADirectoryError, match="give the path of a file"):
        export(nn.Linear(2, 2), torch.randn(2, 2), path=".")
    os.mkfifo("pipe")
    with pytest.raises(OSError, match="pipe is no file"):
        export(nn.Linear(2, 2), torch.randn(2, 2), path="pipe")


@pytest.mark.parametrize(
    ("form", "install"), [("openvino", "pip install openvino"), ("tensorrt", "lightning-accel[tensorrt]")]
)
def test_what_is_not_installed_is_said_with_the_command_that_does(form: str, install: str) -> None:
    package = {"openvino": "openvino", "tensorrt": "torch_tensorrt"}[form]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is here")
    with pytest.raises(MissingPackageError) as caught:
        export(nn.Linear(2, 2), torch.randn(2, 2), form)
    assert install in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "onyx"}, "form='onyx'; did you mean 'onnx'"),
        ({"precision": "int9"}, "precision='int9'"),
        ({"precision": "int8-static"}, r"Allowed: '32', .*and of quantize\(model, 'int8-static'\) what it returns"),
        ({"dynamic": "on"}, "dynamic='on'"),
    ],
)
def test_settings_that_do_not_exist_are_errors(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export(nn.Linear(2, 2), torch.randn(2, 2), **options)
