"""The models of transformers that model_coverage.py measures, in small configurations."""

import os
from typing import Any

from benchmarks.measure.import_torchvision import import_torchvision

Made = tuple[Any, Any]

# The models have few channels but several blocks: as in real models, embeddings and heads cost
# little compared with the blocks.
ENCODER = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
GEMMA = {**DECODER, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
BOTH = {
    "vocab_size": 99,
    "d_model": 64,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "use_cache": False,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "intermediate_size": 256,
    "patch_size": 8,
}
TEXT = {"input_ids": (12,), "attention_mask": (12,)}
WORDS = {"input_ids": (12,)}
PAIR = {"input_ids": (12,), "decoder_input_ids": (8,)}
IMAGE = {"pixel_values": (3, 32, 32)}
LARGER = {"pixel_values": (3, 64, 64)}
# Name -> model class, configuration class, options of the configuration, shapes of the inputs.
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "bart": ("BartForConditionalGeneration", "BartConfig", BOTH | TOKENS, PAIR),
    "bert": ("BertForSequenceClassification", "BertConfig", ENCODER, TEXT),
    "bert-mlm": ("BertForMaskedLM", "BertConfig", ENCODER, TEXT),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": ENCODER | TOKENS, "vision_config": VIT, "projection_dim": 24},
        TEXT | IMAGE,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32, 64, 128], "depths": [2, 2, 4, 2]},
        LARGER,
    ),
    "deit": ("DeiTForImageClassification", "DeiTConfig", VIT, IMAGE),
    "detr": (
        "DetrForObjectDetection",
        "DetrConfig",
        {**BOTH, "num_queries": 5, "backbone_config": "ResNetConfig"},
        LARGER,
    ),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            "vocab_size": 99,
            "dim": 64,
            "n_layers": 4,
            "n_heads": 4,
            "hidden_dim": 256,
            "max_position_embeddings": 64,
        },
        TEXT,
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GEMMA, WORDS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA, WORDS),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, WORDS),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 99,
            "n_positions": 64,
            "n_embd": 64,
            "n_layer": 4,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_cache": False,
        },
        WORDS,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, WORDS),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER, WORDS),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, **EXPERTS, "num_local_experts": 4},
        WORDS,
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {
            "image_size": 64,
            "hidden_sizes": [32, 48, 64],
            "num_attention_heads": 4,
            "initializer_range": 0.2,
            "neck_hidden_sizes": [8, 16, 24, 32, 48, 64, 128],
        },
        LARGER,
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, WORDS),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **DECODER,
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
        },
        WORDS,
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}, WORDS),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", ENCODER, TEXT),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "depths": [2, 2, 2, 2],
            "hidden_sizes": [16, 32, 64, 128],
            "num_attention_heads": [1, 2, 4, 8],
            "decoder_hidden_size": 64,
        },
        LARGER,
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 32,
            "depths": [2, 2, 4],
            "num_heads": [2, 4, 8],
            "window_size": 4,
        },
        IMAGE,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **TOKENS,
            "vocab_size": 99,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 256,
            "num_layers": 4,
            "num_heads": 4,
            "use_cache": False,
        },
        PAIR,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT, IMAGE),
    "vocoder": (
        "SpeechT5HifiGan",
        "SpeechT5HifiGanConfig",
        {"upsample_initial_channel": 64, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8]},
        {"spectrogram": (20, 80)},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "conv_dim": [32, 32, 32],
            "conv_stride": [4, 2, 2],
            "conv_kernel": [8, 3, 3],
            "num_feat_extract_layers": 3,
            "vocab_size": 30,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
        {"input_values": (800,)},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **BOTH,
            **TOKENS,
            "num_mel_bins": 16,
            "max_source_positions": 30,
            "max_target_positions": 30,
            "begin_suppress_tokens": None,
        },
        {"input_features": (16, 60), "decoder_input_ids": (8,)},
    ),
}
# The outputs to compare: these models also return the states of their encoders.
ANSWERS = {
    "bart": ("logits",),
    "clip": ("logits_per_image",),
    "detr": ("logits", "pred_boxes"),
    "t5": ("logits",),
    "whisper": ("logits",),
}


def make_transformers(name: str) -> Made:
    """Return a model of transformers and its example inputs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_torchvision()
    import transformers

    network, config, options, shapes = TRANSFORMERS[name]
    if "backbone_config" in options:
        backbone = transformers.ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32, 64, 128],
            depths=[2, 2, 2, 2],
            layer_type="basic",
            out_features=["stage4"],
        )
        options = {**options, "backbone_config": backbone}
    model = getattr(transformers, network)(getattr(transformers, config)(**options))
    if name in ANSWERS:
        model = _answering(model, ANSWERS[name])
    return model, {key: _example(key, shape) for key, shape in shapes.items()}


def _answering(model: Any, keys: tuple[str, ...]) -> Any:
    """Return a model with only these outputs, because the channels of an output are frozen."""
    from torch import nn

    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            out = self.model(**inputs)
            return tuple(out[key] for key in keys)

    return Answer()


def _example(key: str, shape: tuple[int, ...]) -> Any:
    """Return an input of two samples: tokens, an attention mask, or random numbers."""
    import torch

    if key.endswith("input_ids"):
        return torch.randint(3, 99, (2, *shape))
    if key == "attention_mask":
        return torch.ones(2, *shape, dtype=torch.int64)
    return torch.randn(2, *shape)
