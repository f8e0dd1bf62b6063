"""Hugging Face models of real classes at a size for tests, built from configs: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Factory = Callable[[], nn.Module]
Batch = Callable[[], dict[str, torch.Tensor]]

BATCH, LENGTH, VOCABULARY = 2, 12, 37
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_models() -> dict[str, tuple[Factory, Batch]]:
    """Family → how to make its model (eager attention, no dropout) and a batch with labels, of which it has a loss.

    Batches of text have two padded positions in their second sample, which the labels leave out.
    """
    return {
        "gpt2": (_gpt2, _text),
        "bert": (_bert, _text),
        "vit": (_vit, _images),
        "llama": (_llama, _text),
        "t5": (_t5, _text),
        "whisper": (_whisper, _speech),
    }


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **_TOKENS,
    )
    return _eager(GPT2LMHeadModel, config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **_TOKENS,
    )
    return _eager(BertForMaskedLM, config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _eager(ViTForImageClassification, config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **_TOKENS,
    )
    return _eager(LlamaForCausalLM, config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **_TOKENS,
    )
    return _eager(T5ForConditionalGeneration, config)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0.0,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_TOKENS,
    )
    return _eager(WhisperForConditionalGeneration, config)


def _eager(kind: Any, config: Any) -> nn.Module:
    model = kind._from_config(config, attn_implementation="eager")
    assert isinstance(model, nn.Module)
    return model.train()


def _text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 5, (BATCH,))}


def _speech() -> dict[str, torch.Tensor]:
    # Two frames of sound for every position of the encoder.
    return {
        "input_features": torch.randn(BATCH, 8, 32),
        "labels": torch.randint(3, VOCABULARY, (BATCH, LENGTH)),
    }
