"""Architectures of transformers by their configuration alone, each at a size for tests: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

BATCH, LENGTH, VOCABULARY, SIDE, LABELS = 2, 16, 37, 32, 5


@dataclass(frozen=True)
class Architecture:
    """A model of transformers.

    Attributes:
        name: Its class.
        settings: Of its configuration.
        batch: Makes a batch with labels, of which it has a loss.
        asked: What else it is called with.
        is_slow: Whether it is left to `make test-slow`.
    """

    name: str
    settings: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]
    asked: dict[str, bool] = field(default_factory=dict)
    is_slow: bool = False

    def make(self) -> nn.Module:
        import transformers  # seconds, and not before somebody needs it

        kind: Any = getattr(transformers, self.name)
        # Only the spelled-out attention has weights to give back.
        attention = {"attn_implementation": "eager"} if self.asked.get("output_attentions") else {}
        model = kind._from_config(kind.config_class(**self.settings), **attention)
        assert isinstance(model, nn.Module)
        return model.train()


# -- batches -----------------------------------------------------------------------------------------------------


def text(g: torch.Generator) -> Batch:
    """The second text is two tokens shorter."""
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=g)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def unpadded(g: torch.Generator) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=g)
    return {"input_ids": tokens, "labels": tokens}


def classified_text(g: torch.Generator) -> Batch:
    return {**text(g), "labels": torch.randint(0, 2, (BATCH,), generator=g)}


def document(g: torch.Generator) -> Batch:
    corners = torch.randint(0, 500, (BATCH, LENGTH, 2), generator=g)
    return {**text(g), "bbox": torch.cat([corners, corners + 100], dim=-1)}


def translated(g: torch.Generator) -> Batch:
    return {**text(g), "labels": torch.randint(3, VOCABULARY, (BATCH, 8), generator=g)}


def images(g: torch.Generator) -> Batch:
    return {**unlabelled_images(g), "labels": torch.randint(0, LABELS, (BATCH,), generator=g)}


def unlabelled_images(g: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE, generator=g)}


def segmented_images(g: torch.Generator) -> Batch:
    return {**images(g), "labels": torch.randint(0, LABELS, (BATCH, SIDE, SIDE), generator=g)}


def captioned_images(g: torch.Generator) -> Batch:
    given = {**text(g), **unlabelled_images(g)}
    del given["labels"]
    return given


def videos(g: torch.Generator) -> Batch:
    hidden = torch.arange(2 * 16).remainder(2).bool().expand(BATCH, -1)
    return {"pixel_values": torch.randn(BATCH, 4, 3, SIDE, SIDE, generator=g), "bool_masked_pos": hidden}


def sounds(g: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(BATCH, 400, generator=g),
        "labels": torch.randint(1, VOCABULARY, (BATCH, 3), generator=g),
    }


def spectrograms(g: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(BATCH, 32, 16, generator=g),
        "labels": torch.randint(0, LABELS, (BATCH,), generator=g),
    }


# -- settings ----------------------------------------------------------------------------------------------------

# Dropped attention weights are other ones in a fused kernel; what else is dropped is the same in both runs.
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {
    **_TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "attention_probs_dropout_prob": 0.0,
}
_DECODER = {**_TEXT, "num_key_value_heads": 1, "attention_dropout": 0.0}
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": SIDE,
    "patch_size": 8,
    "num_labels": LABELS,
    "attention_probs_dropout_prob": 0.0,
}
_WINDOWS = {
    "image_size": SIDE,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
    "num_labels": LABELS,
    "attention_probs_dropout_prob": 0.0,
}
_CONVNEXT = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_labels": LABELS, "drop_path_rate": 0.1}
_STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": LABELS}
_SOUND = {
    **_TEXT,
    "conv_dim": (8, 8),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "attention_dropout": 0.0,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_ENCODER_DECODER = {
    **_TOKENS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
_HIDDEN, _WEIGHTS = {"output_hidden_states": True}, {"output_attentions": True}
_BOTH = {**_HIDDEN, **_WEIGHTS}

_CASES: list[tuple[str, dict[str, Any], Callable[[torch.Generator], Batch], dict[str, bool]]] = [
    # Vision.
    (
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": LABELS,
        },
        segmented_images,
        {},
    ),
    ("SwinForImageClassification", _WINDOWS, images, _HIDDEN),
    ("Swinv2ForImageClassification", _WINDOWS, images, {}),
    ("DeiTForImageClassification", _VISION, images, {}),
    ("BeitForImageClassification", {**_VISION, "use_relative_position_bias": True}, images, {}),
    ("Dinov2ForImageClassification", _VISION, images, _BOTH),
    (
        "ViTMAEForPreTraining",
        {
            **_VISION,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
        unlabelled_images,
        {},
    ),
    (
        "VideoMAEForPreTraining",
        {
            **_VISION,
            "num_frames": 4,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
        videos,
        {},
    ),
    ("ConvNextForImageClassification", _CONVNEXT, images, {}),
    ("ConvNextV2ForImageClassification", _CONVNEXT, images, _HIDDEN),
    ("ResNetForImageClassification", _STAGES, images, _HIDDEN),
    ("RegNetForImageClassification", {**_STAGES, "groups_width": 8}, images, {}),
    (
        "MobileViTForImageClassification",
        {
            "image_size": SIDE,
            "hidden_sizes": [8, 8, 16],
            "neck_hidden_sizes": [8] * 7,
            "num_attention_heads": 2,
            "num_labels": LABELS,
        },
        images,
        {},
    ),
    (
        "EfficientNetForImageClassification",
        {
            "image_size": SIDE,
            "width_coefficient": 0.1,
            "depth_coefficient": 0.1,
            "hidden_dim": 128,
            "depth_divisor": 8,
            "num_labels": LABELS,
        },
        images,
        {},
    ),
    (
        "PvtV2ForImageClassification",
        {
            "image_size": SIDE,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "num_labels": LABELS,
            "attention_probs_dropout_prob": 0.0,
        },
        images,
        {},
    ),
    (
        "PoolFormerForImageClassification",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": LABELS},
        images,
        {},
    ),
    (
        "CLIPModel",
        {"projection_dim": 8, "text_config": _TEXT, "vision_config": _VISION},
        captioned_images,
        {"return_loss": True},
    ),
    ("SiglipModel", {"text_config": _TEXT, "vision_config": _VISION}, captioned_images, {"return_loss": True}),
    # Sound.
    ("Wav2Vec2ForCTC", _SOUND, sounds, {}),
    ("HubertForCTC", _SOUND, sounds, _HIDDEN),
    (
        "ASTForAudioClassification",
        {**_VISION, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 32, "num_mel_bins": 16},
        spectrograms,
        {},
    ),
    # Text, read both ways.
    ("RobertaForMaskedLM", _TEXT, text, _HIDDEN),
    ("AlbertForMaskedLM", {**_TEXT, "embedding_size": 8}, text, {}),
    (
        "DistilBertForMaskedLM",
        {
            **_TOKENS,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 32,
            "max_position_embeddings": 64,
            "attention_dropout": 0.0,
        },
        text,
        {},
    ),
    ("ElectraForMaskedLM", {**_TEXT, "embedding_size": 8}, text, _WEIGHTS),
    ("DebertaV2ForMaskedLM", {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, text, {}),
    ("LongformerForMaskedLM", {**_TEXT, "attention_window": 4}, text, {}),
    ("BigBirdForMaskedLM", {**_TEXT, "attention_type": "original_full"}, text, {}),
    ("LayoutLMForMaskedLM", _TEXT, document, {}),
    ("FNetForMaskedLM", _TEXT, unpadded, {}),
    (
        "FunnelForSequenceClassification",
        {
            **_TOKENS,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 32,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "attention_dropout": 0.0,
        },
        classified_text,
        {},
    ),
    (
        "XLNetForSequenceClassification",
        {**_TOKENS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
        classified_text,
        _HIDDEN,
    ),
    (
        "PerceiverForMaskedLM",
        {
            **_TOKENS,
            "d_model": 16,
            "d_latents": 16,
            "num_latents": 8,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "qk_channels": 16,
            "v_channels": 16,
            "max_position_embeddings": LENGTH,
            "attention_probs_dropout_prob": 0.0,
        },
        text,
        {},
    ),
    # Text, read forwards.
    ("OPTForCausalLM", {**_DECODER, "ffn_dim": 32, "word_embed_proj_dim": 16}, text, {}),
    ("BloomForCausalLM", {**_TOKENS, "hidden_size": 16, "n_layer": 2, "n_head": 2}, text, _HIDDEN),
    ("GPTNeoXForCausalLM", _DECODER, text, _WEIGHTS),
    ("MistralForCausalLM", {**_DECODER, "sliding_window": 8}, text, {}),
    ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 2}, text, {"output_router_logits": True}),
    (
        "Qwen2MoeForCausalLM",
        {
            **_DECODER,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        text,
        {},
    ),
    ("Gemma2ForCausalLM", {**_DECODER, "head_dim": 8, "sliding_window": 8}, text, {}),
    ("PhiForCausalLM", _DECODER, text, {}),
    ("FalconForCausalLM", {**_TEXT, "attention_dropout": 0.0}, text, {}),
    ("MambaForCausalLM", {**_TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, unpadded, {}),
    (
        "RwkvForCausalLM",
        {**_TOKENS, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2},
        unpadded,
        _HIDDEN,
    ),
    # From one text to another.
    ("BartForConditionalGeneration", _ENCODER_DECODER, translated, _BOTH),
    ("PegasusForConditionalGeneration", _ENCODER_DECODER, translated, {}),
]

_SLOW = {
    # Neighbours of others that are built of the same parts.
    *("DeiTForImageClassification", "VideoMAEForPreTraining", "ConvNextV2ForImageClassification"),
    *("RegNetForImageClassification", "PoolFormerForImageClassification", "SiglipModel", "HubertForCTC"),
    *("ASTForAudioClassification", "DistilBertForMaskedLM", "ElectraForMaskedLM", "LayoutLMForMaskedLM"),
    *("Qwen2MoeForCausalLM", "PhiForCausalLM", "PegasusForConditionalGeneration"),
    # Seconds, most of them to capture attention that is written by hand.
    "Swinv2ForImageClassification",
    "PvtV2ForImageClassification",
    "MobileViTForImageClassification",
    "FunnelForSequenceClassification",
    "PerceiverForMaskedLM",
    "LongformerForMaskedLM",
    "XLNetForSequenceClassification",
    "EfficientNetForImageClassification",
    "DebertaV2ForMaskedLM",
    "SegformerForSemanticSegmentation",
}

ARCHITECTURES = {
    name: Architecture(name, settings, batch, asked, is_slow=name in _SLOW) for name, settings, batch, asked in _CASES
}
