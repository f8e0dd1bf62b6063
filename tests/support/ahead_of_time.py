"""A program that has torch, built for CUDA, prepare the demo's GPT for a card that is not there: an H100.

Each line that it prints is JSON: every Triton kernel that Inductor makes of a block, compiled; then what the forward
pass under each technique returns, on tensors that are on the card as far as shapes and dtypes go.

Backward passes are not in it: autograd's engine asks the driver for a context of the device. Nor are matrix products
and attention, which are kernels of libraries.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bytes_gpt import Block, BytesGPT
from lightning_accel import Plan, accelerate

CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    warp_size=32,
)
CUDA = "torch._dynamo.device_interface.CudaInterface"
ANSWERS: dict[str, Any] = {
    "torch.cuda.get_device_properties": CARD,
    "torch.cuda.get_device_capability": (9, 0),
    "torch.cuda.get_device_name": CARD.name,
    "torch.cuda.current_device": 0,
    "torch.cuda.mem_get_info": (CARD.total_memory, CARD.total_memory),
    f"{CUDA}.get_device_properties": CARD,
    f"{CUDA}.current_device": 0,
    f"{CUDA}.get_compute_capability": 90,
    f"{CUDA}.raise_if_triton_unavailable": None,
    f"{CUDA}.Worker.get_device_properties": CARD,
    "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": None,
}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash_attention": {"flash_attention": "sdpa"},
    "inplace_activations": {"inplace_activations": "auto"},
    "full": {"gradient_checkpointing": "full"},
    "selective": {"gradient_checkpointing": "selective"},
}
OFF = dict.fromkeys(
    ("compile", "threads", "flash_attention", "inplace_activations", "loss", "optimizer", "matmul_precision"),
    "off",
)


def main() -> None:
    for name, answer in ANSWERS.items():
        mock.patch(name, lambda *_, answer=answer: answer).start()
    for name, kernel in kernels_of(Block(64, 4, 32, 0.0), torch.randn(2, 32, 64)):  # first: torch asks for Triton once
        print(json.dumps({"kernel": name, **kernel}))
    for dtype in (torch.float32, torch.bfloat16):
        for name, settings in PLANS.items():
            print(json.dumps({"plan": name, "asked": str(dtype), **returned(settings, dtype)}))


def returned(settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What the model returns under a plan, and at how many sites it was changed."""
    mode = FakeTensorMode()
    with mode, torch.device("cuda"):
        model = BytesGPT(dim=64, depth=2, num_heads=4, seq_len=32)
        model.blocks[0].mlp[1] = nn.ReLU()  # torch has no GELU in place
    handle = accelerate(model, Plan().replace(**{**OFF, "precision": "32-true", "trust": "unchecked", **settings}))
    with mode, autocast(dtype), handle.step():
        out = model(torch.randint(256, (2, 32), device="cuda"))
    sites = sum(len(handle.report.applied(name)) for name in settings)
    return {"shape": list(out.shape), "dtype": str(out.dtype), "device": str(out.device), "sites": sites}


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """What ``torch.autocast`` sets; that warns, and sets nothing, where there is no card."""
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", dtype != torch.float32)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def kernels_of(block: nn.Module, x: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every Triton kernel of a block's forward pass, compiled for the card."""
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", wrapper_of(block, x), re.DOTALL):
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)  # not to the launchers, which would load it
        (found, *_) = kernel.compile_results
        ptx = re.findall(r"^\.target (\w+)", found.kernel.asm["ptx"], re.MULTILINE)
        yield name, {"target": ptx[0], "bytes": len(found.kernel.asm["cubin"])}


def wrapper_of(block: nn.Module, x: Tensor) -> str:
    """The program that Inductor writes for a block in bfloat16, with its kernels in it."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.func import functional_call
    from torch.fx.experimental.proxy_tensor import make_fx

    state = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    with FakeTensorMode() as mode:
        inputs = [torch.empty_like(tensor, device="cuda") for tensor in map(mode.from_tensor, (x, *state.values()))]

        def forward(x: Tensor, *values: Tensor) -> tuple[Any]:
            with autocast(torch.bfloat16):
                return (functional_call(block, dict(zip(state, values, strict=True)), (x,)),)

        with torch.no_grad():
            traced: Callable[..., Any] = make_fx(forward, decomposition_table=select_decomp_table())(*inputs)
        graph = GraphLowering(traced, inputs)
        is_there = mock.patch("torch.cuda.is_available", return_value=True)  # earlier torch would ask the driver more
        with is_there, V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            written = graph.codegen()[0]
    return written if isinstance(written, str) else written.value


if __name__ == "__main__":
    main()
