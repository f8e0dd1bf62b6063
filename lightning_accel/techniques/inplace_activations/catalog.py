"""What PyTorch's own modules and functions do with storage, as far as overwriting their results is concerned."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Their result has storage of its own (nn.Linear's on 3-D input is a view of it, which the watch on a real step sees),
# and neither they nor their backward read it again.
FRESH_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.GELU),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
)

# In evaluation (nn.Identity always) these return the very tensor they were given.
PASSING_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
VIEW_MODULES: tuple[type[nn.Module], ...] = (nn.Flatten, nn.Unflatten)

FRESH_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(torch.add, torch.sub, torch.mul, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
        *(torch.cat, torch.concat, torch.concatenate, torch.stack, torch.clone),
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(F.linear, F.bilinear, F.embedding, F.gelu, F.interpolate, F.batch_norm, F.instance_norm),
        *(F.layer_norm, F.group_norm, F.rms_norm),
        *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
        *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
        *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    }
)
FRESH_METHODS = frozenset({"add", "sub", "mul", "matmul", "mm", "bmm", "clone"})
SELF_METHODS = frozenset({"add_", "sub_"})  # in place, and nothing saved

# Their backward reads their own result (or, being activations, may once they are in place).
_SAVING = _words(
    """
    relu relu6 leaky_relu elu celu selu rrelu prelu sigmoid tanh softmax log_softmax softmin exp exp2 expm1 sqrt
    rsqrt reciprocal pow logsumexp cumprod prod norm normalize hardtanh threshold logsigmoid silu mish hardswish
    scaled_dot_product_attention
    """
)

METADATA = _words(
    """
    shape size dtype device layout ndim dim numel nelement stride element_size itemsize requires_grad is_cuda
    is_leaf is_floating_point is_complex is_contiguous
    """
)

# Methods of nn.Module that hand out submodules.
HANDS_OUT = frozenset({"children", "modules", "named_children", "named_modules"})
TAKES_APART = _words(
    """
    _modules __dict__ __getattr__ get_submodule apply _apply _call_impl _wrapped_call_impl _slow_forward
    add_module register_module register_forward_hook register_forward_pre_hook register_full_backward_hook
    __call__ register_full_backward_pre_hook register_backward_hook set_submodule compile
    _replicate_for_data_parallel
    """
)

# Run before the first step or outside it; what they leave behind in the objects is looked at instead.
SETUP_METHODS = _words(
    """
    __init__ __new__ __post_init__ __repr__ __str__ __getstate__ __setstate__ __reduce__ __deepcopy__ __del__
    __hash__ __eq__ extra_repr reset_parameters init_weights _init_weights initialize_weights
    _initialize_weights setup teardown configure_model configure_optimizers configure_callbacks
    configure_sharded_model prepare_data train_dataloader val_dataloader test_dataloader predict_dataloader
    on_save_checkpoint on_load_checkpoint load_from_checkpoint state_dict load_state_dict _load_from_state_dict
    _save_to_state_dict
    """
)
_LIBRARIES = (
    *("torch.nn.modules.module", "lightning.pytorch.core.", "lightning.fabric.", "pytorch_lightning.core."),
    *("lightning_fabric.", "transformers.modeling_utils", "transformers.generation", "huggingface_hub."),
)

_UNREMARKABLE = frozenset({"__init__", "extra_repr", "__repr__", "reset_parameters", "_load_from_state_dict"})


def is_library(cls: type) -> bool:
    """Whether the methods of ``cls`` are a framework's, which knows nothing of the user's attributes."""
    return cls is object or cls.__module__ in ("abc", "typing") or cls.__module__.startswith(_LIBRARIES)


def is_plainly(module: nn.Module, known: tuple[type[nn.Module], ...]) -> bool:
    """Whether ``module`` is one of ``known``, or of a subclass that computes as it does."""
    for cls in type(module).__mro__:
        if cls in known:
            return True
        if any(callable(entry) and name not in _UNREMARKABLE for name, entry in vars(cls).items()):
            return False
    return False


def is_sequential(module: nn.Module) -> bool:
    """Whether ``module`` runs its children one after the other and nothing else can happen between them."""
    return is_plainly(module, (nn.Sequential,))


def is_builtin(module: nn.Module) -> bool:
    """Whether PyTorch wrote the ``forward`` of ``module``."""
    return str(type(module).forward.__module__).startswith("torch.nn.")


def saves_its_result(function: Any) -> bool:
    """Whether the backward pass of ``function`` is known to read what it returned."""
    module = getattr(function, "__module__", None) or "torch"
    return str(module).startswith("torch") and getattr(function, "__name__", "").rstrip("_") in _SAVING


def overwrites(function: Any, keywords: dict[str, object], positional: int) -> bool:
    """Whether a call of ``function`` may write to its first argument."""
    name = getattr(function, "__name__", "")
    if (name.endswith("_") and not name.startswith("_")) or "out" in keywords:
        return True
    if "inplace" in keywords:
        return keywords["inplace"] is not False
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return "inplace" in parameters and parameters.index("inplace") < positional
