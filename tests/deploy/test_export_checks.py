"""What a file is called with before it is let out: other numbers and other sizes than the example's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.deploy import DynamicDimensionError, ExportError, export
from lightning_accel.deploy.shapes import other_numbers

pytestmark = pytest.mark.numbers


class Clipped(nn.Module):
    """Decides by a value, (B, 8) → (B, 8)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 3:
            return x / 3
        return x


class Repeated(nn.Module):
    """Counts by a value."""

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for _ in range(int(x.max().item())):
            total = total + x
        return total


class ThroughNumPy(nn.Module):
    """Leaves torch and comes back."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.from_numpy(x.detach().numpy())


class Sized(nn.Module):
    """Decides by sizes alone, (B, T, 8) → (B, T, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 100 or len(x) == 0:
            raise ValueError("too long")
        steps = torch.arange(x.shape[1])
        _ = x[:, :, 0] * steps
        if steps.sum() < 0:
            return x
        return self.layer(x) * (steps + 1)[None, :, None]


class ThroughBytes(nn.Module):
    """Leaves torch unseen."""

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(x.untyped_storage().tolist())


class Positions(nn.Module):
    """Adds a table of positions, whole, or as much as the sequence has: tokens (B, T) → (B, T, 8)."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(1, 12, 8))
        self.is_cut = is_cut

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.positions[:, : tokens.shape[1]] if self.is_cut else self.positions
        return self.embedding(tokens) + table


class Padded(nn.Module):
    """torch's encoder past padding: input_ids and attention_mask (B, T) → (B, T, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"]
        x = self.encoder(self.embedding(batch["input_ids"]), src_key_padding_mask=mask == 0)
        return (x * mask[..., None]).sum(1)


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{Path(__file__).name}:{lines.index(text) + 1}"


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Clipped(), "        if x.abs().max() > 3:"),
        (Repeated(), "        for _ in range(int(x.max().item())):"),
        (ThroughNumPy(), "        return 2 * torch.from_numpy(x.detach().numpy())"),
    ],
)
def test_torchscript_refuses_what_depends_on_numbers_with_the_line_of_the_model(model: nn.Module, line: str) -> None:
    with pytest.raises(ExportError, match="control flow depends on data") as caught:
        export(model, torch.rand(2, 8), "torchscript", dynamic="off")
    assert line_of(line) in str(caught.value)
    assert list(Path().iterdir()) == []


def test_torchscript_takes_what_depends_on_sizes() -> None:
    model, x = Sized(), torch.randn(3, 7, 8)
    found = export(model, torch.randn(2, 5, 8), "torchscript").load()(x)
    torch.testing.assert_close(found, model(x))


def test_a_file_that_holds_a_number_of_the_example_is_found_by_other_numbers() -> None:
    with pytest.raises(ExportError, match="with other numbers than the example's"):
        export(ThroughBytes(), torch.rand(2, 8), "torchscript", dynamic="off")
    assert list(Path().iterdir()) == []


def test_other_numbers_are_such_as_the_model_may_be_given() -> None:
    tokens, mask = torch.tensor([[3, 5, 7], [2, 4, 6]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    (), found = other_numbers(((), {"tokens": tokens, "mask": mask, "features": features}))
    assert found["tokens"].tolist() == [[6, 4, 2], [7, 5, 3]]
    assert found["mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found["features"].tolist() == [[1.5, 2.0], [0.5, 1.0]]


def test_torchscript_says_which_dimensions_the_model_fixes() -> None:
    example = torch.randint(11, (2, 12))
    exported = export(Positions(is_cut=False), example, "torchscript")
    assert exported.dynamic == ("input 0: 0 (batch)",)
    assert exported.fixed == {"input 0: 1 (sequence)": 12}
    with pytest.raises(DynamicDimensionError, match=r"fixes input 0: 1 \(sequence\) is 12"):
        export(Positions(is_cut=False), example, "torchscript", dynamic="batch+sequence")


@pytest.mark.parametrize("form", ["pt2", "torchscript"])
def test_a_sequence_that_may_be_shorter_but_not_longer_is_said_to_be(form: str) -> None:
    exported = export(Positions(is_cut=True), torch.randint(11, (2, 12)), form)
    assert exported.dynamic[1].endswith(": 1 (sequence), 12 at most")


def test_torchscript_has_torchs_encoder_past_padding_for_other_sequences() -> None:
    """Whose shortcut for inference, which is not taken while it is traced, would hold the example's length."""
    ids, mask = torch.randint(11, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    mask[1, -2:] = 0
    exported = export(Padded().eval(), {"input_ids": ids, "attention_mask": mask}, "torchscript")
    assert len(exported.dynamic) == 4


@pytest.mark.parametrize(("size", "dynamic"), [(0, "off"), (1, "batch")])
def test_a_size_that_a_trace_holds_on_to_is_an_error_that_says_what_to_do(size: int, dynamic: str) -> None:
    class Share(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / float(x.shape[size])

    with pytest.raises(
        ExportError, match=f"other numbers .* holds a size of the example's: dynamic='{dynamic}' writes"
    ):
        export(Share(), torch.randn(3, 5, 8), "torchscript")
    assert export(Share(), torch.randn(3, 5, 8), "torchscript", dynamic=dynamic).path.exists()


def test_an_example_that_proves_nothing_is_an_error() -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(ExportError, match=r"output 0, \(2, 4\), has only NaN and infinities on the example"):
        export(model, torch.full((2, 8), torch.nan))
    with pytest.raises(ValueError, match=r"tensors of \(0, 8\), which are empty: give one row at least"):
        export(model, torch.randn(0, 8))
    assert list(Path().iterdir()) == []


def test_a_model_that_draws_random_numbers_is_said_to() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape[0], 1) * float(x.shape[0])

    with pytest.raises(ExportError, match="The model draws random numbers"):
        export(Noisy(), torch.randn(3, 8), "torchscript")


def test_a_model_that_makes_float32_inside_is_told_so_in_half_precision() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * torch.ones(8))

    with pytest.raises(ExportError, match=r"does not go with weights in bfloat16: make tensors with\s+dtype") as caught:
        export(Mixed(), torch.randn(2, 8), precision="bf16")
    assert line_of("            return self.layer(x * torch.ones(8))") in str(caught.value)


@pytest.mark.parametrize(("form", "ending"), [("pt2", ".pt2"), ("aoti", ".pt2"), ("openvino", ".xml")])
def test_an_ending_that_the_form_does_not_have_is_an_error_before_anything_is_exported(form: str, ending: str) -> None:
    with pytest.raises(ValueError, match=f"path='model.bin': .* files that end in '{ending}', 'model{ending}' say"):
        export(nn.Linear(8, 4), torch.randn(2, 8), form, path="model.bin")
    with pytest.raises(IsADirectoryError, match="newfolder is a folder"):
        export(nn.Linear(8, 4), torch.randn(2, 8), form, path="newfolder/")


def test_a_model_in_torchscript_is_an_error_that_asks_for_the_module() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(8, 4))
    with pytest.raises(TypeError, match=r"ScriptModule, .*give the nn\.Module that it was made of"):
        export(scripted, torch.randn(2, 8), "torchscript")


@pytest.mark.medium
def test_numbers_that_a_form_does_not_have_are_said() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x.double()).cumsum(0) * 1.0000001

    with pytest.raises(ExportError, match=r"other numbers .* The model returns float64"):
        export(Wide(), torch.randn(3, 8), "onnx")


def test_an_operator_that_openvino_lacks_is_named() -> None:
    pytest.importorskip("openvino", reason="pip install openvino")

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    with pytest.raises(ExportError, match=r"No conversion rule found for operations: aten.randn_like.default\.$"):
        export(Noisy(), torch.randn(3, 8), "openvino")
