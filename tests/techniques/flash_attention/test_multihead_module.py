"""FlashMultiheadAttention in the place of nn.MultiheadAttention: saved, copied, compiled, in torch's layers, in DDP."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention
from support.techniques.flash_attention.multihead_cases import (
    EMBED_DIM,
    MASKS,
    NUM_HEADS,
    OPTIONS,
    assert_same,
    inputs,
    pair,
    results,
)

pytestmark = pytest.mark.numbers


def test_an_unknown_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"backend='flahs'; did you mean 'flash'\? Allowed: 'sdpa', .*'flex'"):
        FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, backend="flahs")


def test_a_backend_that_does_not_work_here_is_refused_when_called() -> None:
    attn = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, backend="fa3")
    x = torch.randn(5, 2, EMBED_DIM)

    with pytest.raises(ValueError, match=r"backend='fa3'\) does not work here: runs on NVIDIA and AMD GPUs"):
        attn(x, x, x, need_weights=False)


def test_another_backend_computes_the_same() -> None:
    plain, _ = pair(torch.float32, batch_first=True)
    flash = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, batch_first=True, backend="flash")
    flash.load_state_dict(plain.state_dict())
    tensors, _ = inputs(plain, "batch first", 5, 7)

    actual, expected = (results(m, tensors, need_weights=False) for m in (flash, plain))
    assert_same(actual, expected, torch.float32)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_state_dict_fits_both_ways(options: str) -> None:
    plain, flash = pair(**OPTIONS[options])

    assert list(flash.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(flash.state_dict())


def test_the_same_seed_makes_the_same_weights() -> None:
    torch.manual_seed(3)
    plain = nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, 0.1, True, True)
    torch.manual_seed(3)
    flash = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, 0.1, True, True)

    assert all(map(torch.equal, flash.parameters(), plain.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_a_module_of_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    flash = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, backend="flash")
    x = torch.randn(5, 2, EMBED_DIM)
    twin: Any = copied(flash)

    assert twin.backend == "flash"
    torch.testing.assert_close(twin(x, x, x, need_weights=False)[0], flash(x, x, x, need_weights=False)[0])
    with torch.no_grad():
        twin.out_proj.bias.add_(1)
    assert not torch.equal(twin.out_proj.bias, flash.out_proj.bias)


@pytest.mark.parametrize(
    ("masks", "need_weights"),
    [
        *(("no mask", False), ("bool mask and padding", True), ("causal", False)),
        pytest.param("no mask", True, marks=pytest.mark.slow),
        pytest.param("bool mask and padding", False, marks=pytest.mark.slow),
        pytest.param("causal", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_in_one_graph(masks: str, need_weights: bool) -> None:
    torch._dynamo.reset()
    plain, flash = pair(batch_first=True)
    tensors, sizes = inputs(plain, "batch first", 5, 7)
    kwargs = {**MASKS[masks](sizes), "need_weights": need_weights}

    def call(*tensors: Tensor) -> Any:
        return flash(*tensors, **kwargs)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    actual = [t for t in compiled(*tensors) if t is not None]
    gradients = torch.autograd.grad(actual[0].sum(), tensors)
    expected = [t for t in plain(*tensors, **kwargs) if t is not None]
    assert_same([*actual, *gradients], [*expected, *torch.autograd.grad(expected[0].sum(), tensors)])


def test_nested_tensors_go_the_way_of_torch() -> None:
    plain = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    flash = FlashMultiheadAttention(8, 2, batch_first=True).eval()
    flash.load_state_dict(plain.state_dict())
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        x = torch.nested.nested_tensor([torch.randn(4, 8), torch.randn(6, 8)])
        actual, expected = (m(x, x, x, need_weights=False)[0].to_padded_tensor(0.0) for m in (flash, plain))

    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_scripted_and_traced() -> None:
    plain, flash = pair(torch.float32, batch_first=True)
    x = torch.randn(2, 5, EMBED_DIM)
    expected = plain(x, x, x)[0]

    torch.testing.assert_close(torch.jit.script(flash)(x, x, x)[0], expected)
    torch.testing.assert_close(torch.jit.trace(flash, (x, x, x), check_trace=False)(x, x, x)[0], expected)


def layers(root: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (parent, name)
        for parent in root.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.MultiheadAttention)
    ]


def swapped(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with our module in place of each of torch's."""
    model = copy.deepcopy(model)
    for parent, name in layers(model):
        old: Any = getattr(parent, name)
        new = FlashMultiheadAttention(old.embed_dim, old.num_heads, old.dropout, batch_first=old.batch_first)
        new.load_state_dict(old.state_dict())
        setattr(parent, name, new)
    return model


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_inside_a_whole_transformer(batch_first: bool, training: bool) -> None:
    transformer = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=batch_first).train(training)
    source, target = torch.randn(3, 3, 16), torch.randn(3, 3, 16)
    causal_mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    ignored = torch.tensor([[False, False, True]] * 3)

    def outputs(model: nn.Module) -> list[Tensor]:
        out = model(
            source, target, tgt_mask=causal_mask, tgt_is_causal=True, src_key_padding_mask=ignored,
            memory_key_padding_mask=ignored,
        )  # fmt: skip
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    assert_same(outputs(swapped(transformer)), outputs(transformer), torch.float32)


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_inside_a_layer_without_gradients(layer: Any) -> None:
    plain = layer(16, 2, 24, dropout=0.0, batch_first=True).eval()
    x = torch.randn(3, 4, 16)
    args = (x, x + 1) if layer is nn.TransformerDecoderLayer else (x,)

    with torch.inference_mode():
        torch.testing.assert_close(swapped(plain)(*args), plain(*args))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_under_distributed_data_parallel() -> None:
    plain, flash = pair(batch_first=True)
    tensors, _ = inputs(plain, "batch first", 5, 5)
    ddp = DistributedDataParallel(flash)

    for module in (ddp, plain):
        module(*tensors, need_weights=False)[0].square().sum().backward()

    assert_same([p.grad for p in flash.parameters()], [p.grad for p in plain.parameters()])
