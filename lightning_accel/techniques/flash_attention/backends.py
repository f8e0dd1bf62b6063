"""The kernels that compute attention, each with what it needs, what it cannot do, and how to get it."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from lightning_accel.core.host import Host
from lightning_accel.core.patch import temporarily
from lightning_accel.core.torch_private.compilation import compiled_alone
from lightning_accel.techniques.flash_attention.call import AttentionCall, sdpa

_HALF = (torch.float16, torch.bfloat16)

TORCH_KERNELS = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, cuda.can_use_cudnn_attention),
    "flash": (SDPBackend.FLASH_ATTENTION, cuda.can_use_flash_attention),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, cuda.can_use_efficient_attention),
}
"""The kernels that are built into torch, each with what says whether it takes a call."""

# What torch's kernels for AMD cards, AOTriton's, are built for; some of it is experimental, which torch itself says of
# each call (`lacks`). From evaluate_platform_supports_flash_attention in torch/testing/_internal/common_cuda.py.
_AOTRITON = tuple(f"gfx{n}" for n in ("90a", 942, 950, 1100, 1101, 1102, 1150, 1151, 1200, 1201))


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a backend needs of a machine."""

    capability: tuple[int, int]  # of a GPU, at the least
    majors: tuple[int, ...] = ()  # that it is built for; none: all from that capability on
    is_nvidias: bool = False  # and not for AMD's GPUs
    package: str = ""  # that it is in, with the way to get that
    compiler: bool = False  # to build it on the spot

    def missing(self, name: str, host: Host) -> str | None:
        """What ``host`` lacks for the backend ``name``, with the mend; None: nothing."""
        is_torchs, device, found = name in TORCH_KERNELS, host.device_name, host.capability
        if is_torchs and host.kind == "cpu":
            return None if name == "flash" else f"torch has no {name} attention kernel for the CPU: use 'sdpa'"
        if self.is_nvidias and host.kind == "rocm":
            return f"it is for NVIDIA's GPUs, and {device} is AMD's: use 'sdpa'"
        if host.kind not in ("cuda", "rocm"):
            return f"runs on NVIDIA and AMD GPUs, not on {host.kind}: use 'sdpa'"
        if is_torchs and host.kind == "rocm" and host.arch and not host.arch.startswith(_AOTRITON):
            return f"torch has no {name} attention kernel for AMD's {host.arch}: use 'sdpa'"
        if found is not None and found < self.capability:
            have, want = (f"{major}.{minor}" for major, minor in (found, self.capability))
            return f"{device} is too old for it: compute capability {have}, {want} is needed; use 'sdpa'"
        if found is not None and self.majors and found[0] not in self.majors:
            built = " and ".join(f"{major}.x" for major in self.majors)
            return f"is built for compute capability {built}, {device} has {found[0]}.x: use 'sdpa'"
        if self.package and name not in host.kernels:
            return f"needs the package {self.package}"
        if self.compiler and host.compiler is None:
            return "needs Triton and a C compiler to build its kernel"
        return None


class Backend(ABC):
    """One way to compute attention."""

    name: str  # that `flash_attention=` takes
    needs: Needs | None = None  # of the machine

    def unavailable(self, host: Host) -> str | None:
        """Why it does not work on ``host``, with the mend; None where it does."""
        return None if self.needs is None else self.needs.missing(self.name, host)

    def lacks(self, call: AttentionCall) -> str | None:
        """What this call needs that the backend does not have: a head size, a dtype, a mask; None if nothing."""
        return None

    @abstractmethod
    def __call__(self, call: AttentionCall) -> Tensor:
        """The output: (B, H, T, Dv)."""


class Sdpa(Backend):
    """torch's ``scaled_dot_product_attention``, which chooses the kernel itself. Takes every call."""

    name = "sdpa"

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        return sdpa(call)


class SdpaKernel(Backend):
    """One kernel of ``scaled_dot_product_attention``, and no other."""

    def __init__(self, name: str, needs: Needs, *, kernel: str = "") -> None:
        self.name = name
        self.needs = needs
        self._kernel, self._takes = TORCH_KERNELS[kernel or name]

    @override
    def lacks(self, call: AttentionCall) -> str | None:
        call = call.with_dense_mask()
        q, k, v, mask = call.query, call.key, call.value, call.mask
        if q.device.type != "cpu":
            is_taken = self._takes(cuda.SDPAParams(q, k, v, mask, call.dropout_p, call.is_causal, False), False)
            masked = "no mask" if mask is None else f"a mask of {tuple(mask.shape)}"
            return None if is_taken else f"the {self.name} kernel takes no {_kind(q)} with {masked} on this device"
        # What torch's CPU kernel asks for, in sdp_utils_cpp.h.
        if call.dropout_p:
            return "the CPU's flash kernel has no dropout"
        if v.shape[-1] != q.shape[-1]:
            return "the CPU's flash kernel takes values as wide as the queries"
        has_bias = mask is not None and mask.requires_grad
        return "the CPU's flash kernel has no gradient for a bias" if has_bias else None

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        with sdpa_kernel(self._kernel):
            return sdpa(call)


class FlashImplementation(SdpaKernel):
    """FlashAttention 3 or 4 behind ``scaled_dot_product_attention``, where its package is installed.

    https://docs.pytorch.org/docs/stable/nn.attention.html
    """

    @override
    def lacks(self, call: AttentionCall) -> str | None:
        if call.dropout_p:
            return f"{self.name} has no dropout"
        return f"{self.name} takes float16 and bfloat16" if call.query.dtype not in _HALF else super().lacks(call)

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        name, current = self.name.upper(), attention.current_flash_attention_impl
        if current() == name:
            return super().__call__(call)
        with temporarily(current, _activate, name):
            out = super().__call__(call)
        node = out.grad_fn
        if node is not None and "ScaledDotProduct" not in node.name():
            node = node.next_functions[0][0]  # torch has padded the heads, and cuts its output
        if node is not None:  # the implementation has a backward pass, too
            stack = ExitStack()
            node.register_prehook(lambda _: stack.enter_context(temporarily(current, _activate, name)))
            node.register_hook(lambda *_: stack.close())
        return out


class FlashAttn(Backend):
    """The ``flash-attn`` package: windows, and padding masks as sequences of their true lengths.

    Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691.
    """

    name = "flash-attn"
    needs = Needs(
        capability=(8, 0),
        package="'flash-attn': pip install 'lightning-accel[flash]' --no-build-isolation; for ROCm build it from"
        " github.com/Dao-AILab/flash-attention",
    )

    @override
    def lacks(self, call: AttentionCall) -> str | None:
        head_dim = call.query.shape[-1]
        if call.query.dtype not in _HALF:
            return f"flash-attn takes float16 and bfloat16, not {_kind(call.query)}"
        if head_dim > 256 or call.value.shape[-1] != head_dim:
            return f"flash-attn takes heads up to 256 wide, the value's as wide as the query's, not {_kind(call.query)}"
        if (call.is_causal or call.window is not None) and call.query.shape[2] != call.key.shape[2]:
            return (
                "flash-attn aligns causal masks and windows at the other corner when there are more keys than queries"
            )
        if call.mask is not None and (call.key_padding is None or call.is_causal or call.window is not None):
            return "flash-attn takes padding masks, causal masks or windows, one at a time, and no other mask"
        return None

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        q, k, v = (t.transpose(1, 2) for t in (call.query, call.key, call.value))  # (B, T, H, D), its own layout
        options: dict[str, Any] = {
            "dropout_p": call.dropout_p,
            "softmax_scale": call.true_scale,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        real = call.key_padding
        if real is None:
            window = (-1, -1) if call.window is None else call.window
            out = flash_attn_func(q, k, v, causal=call.is_causal, window_size=window, **options)
            whole: Tensor = out.transpose(1, 2)
            return whole
        batch, rows = q.shape[:2]
        lengths = real.sum(dim=1, dtype=torch.int32)
        starts_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        starts_q = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=q.device)
        # Real keys first, padding behind them, which no query sees: k[real] would wait for the device to count them.
        order = real.flatten().int().argsort(descending=True, stable=True)
        # The kernel leaves the gradients of what it does not see as they were in memory.
        unseen = ~real.flatten()[order, None, None]
        k, v = (t.flatten(0, 1).index_select(0, order).masked_fill_(unseen, 0) for t in (k, v))
        packed: Tensor = flash_attn_varlen_func(
            q.flatten(0, 1), k, v, starts_q, starts_k, rows, real.shape[1], causal=False, **options
        )
        return packed.view(batch, rows, *packed.shape[1:]).transpose(1, 2)


class Flex(Backend):
    """FlexAttention, compiled: biases and masks of any shape inside one kernel, gradients of a bias too.

    Dong et al., "Flex Attention" (2024), https://arxiv.org/abs/2412.05496.
    """

    name = "flex"
    needs = Needs(capability=(8, 0), compiler=True)

    @override
    def lacks(self, call: AttentionCall) -> str | None:
        if call.dropout_p:
            return "flex has no dropout"
        if call.query.shape[-1] < 16 or call.value.shape[-1] < 16:
            return f"flex takes heads from 16 wide on, not {_kind(call.query)}"
        return None

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        mask, is_causal, window = call.mask, call.is_causal, call.window
        sizes = (0, 0, 0, 0) if mask is None else mask.shape

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if mask is not None:
                # A dimension of size one is one and the same for all.
                indices = (index if size > 1 else index * 0 for index, size in zip((b, h, i, j), sizes, strict=True))
                at = mask[tuple(indices)]
                value = torch.where(at, value, -math.inf) if mask.dtype == torch.bool else value + at
            if is_causal:
                value = torch.where(i >= j, value, -math.inf)
            if window is not None:
                value = torch.where((i - j <= window[0]) & (j - i <= window[1]), value, -math.inf)
            return value

        score_mod = None if mask is None and not is_causal and window is None else score
        out = _compiled_flex()(call.query, call.key, call.value, score_mod=score_mod, scale=call.true_scale)
        assert isinstance(out, Tensor)
        return out


_SOURCE = "github.com/Dao-AILab/flash-attention"
# The majors are those that torch asks for in torch/nn/attention/_fa3.py and _fa4.py.
_FA3 = Needs(
    capability=(9, 0), majors=(9,), is_nvidias=True, package=f"'flash_attn_interface': build it from {_SOURCE}"
)
_FA4 = Needs(capability=(9, 0), majors=(9, 10), is_nvidias=True, package="'flash_attn.cute': pip install flash-attn-4")

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Sdpa(),
        SdpaKernel("cudnn", Needs(capability=(8, 0), is_nvidias=True)),
        SdpaKernel("flash", Needs(capability=(8, 0))),
        SdpaKernel("efficient", Needs(capability=(5, 0))),
        FlashImplementation("fa3", _FA3, kernel="flash"),
        FlashImplementation("fa4", _FA4, kernel="flash"),
        FlashAttn(),
        Flex(),
    )
}


def installed_backends(host: Host) -> list[Backend]:
    """Those that work on ``host``."""
    return [backend for backend in BACKENDS.values() if backend.unavailable(host) is None]


def attend(call: AttentionCall, backend: Backend) -> Tensor:
    """The call through ``backend``, or torch's own choice where it lacks what the call needs: (B, H, T, Dv)."""
    return backend(call) if backend.lacks(call) is None else sdpa(call)


def _kind(query: Tensor) -> str:
    return f"{str(query.dtype).removeprefix('torch.')} heads of {query.shape[-1]}"


def _activate(implementation: str | None) -> None:
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return compiled_alone(flex_attention)
