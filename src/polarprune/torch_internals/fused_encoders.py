"""Switches that keep torch's Transformer encoders off their fused kernels.

In eval mode, `nn.TransformerEncoder` may pack padded inputs as nested tensors, and each
`nn.TransformerEncoderLayer` may run as one kernel, which reads its weights directly. Neither calls
the modules inside, so gates, weighted norms and replaced layers would have no effect.
"""

from __future__ import annotations

from torch import nn


def set_packing(encoder: nn.TransformerEncoder, packs: bool) -> None:
    """Choose whether an encoder packs padded inputs for the fused kernels of its layers."""
    encoder.use_nested_tensor = packs


def stop_packing(model: nn.Module) -> None:
    """Stop all encoders in a model from packing their inputs: packing zeroes padded positions."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            set_packing(module, False)


def stop_fused_kernel(layer: nn.TransformerEncoderLayer) -> None:
    """Stop a layer from using the fused kernel, which knows two activations only."""
    layer.activation_relu_or_gelu = 0


def may_fuse(layer: nn.TransformerEncoderLayer) -> bool:
    """Return whether a layer has an activation that the fused kernel knows."""
    return bool(layer.activation_relu_or_gelu)
