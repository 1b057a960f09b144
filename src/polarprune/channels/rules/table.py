"""Which operation follows which rule. One without a rule freezes what it touches.

Nothing is ever cut on a guess: unknown operations are listed, with the place where they occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...tracing.tape import Op
from ..labels import support
from ..propagation import Flow, Rule
from .contractions import attention, convolution, matmul, matvec
from .movement import (
    add_rows,
    cat,
    create,
    create_like,
    cut,
    embedding,
    expand,
    fill,
    gather,
    movement,
    pad,
    pick,
    pick_along,
    pointwise,
    put,
    restride,
    roll,
    same,
    scatter_add,
    select,
    shuffle,
    slide,
    split,
    squeeze,
    stack,
    view,
    write,
)
from .reductions import (
    channel_norm,
    glu,
    group_norm,
    layer_norm,
    patches,
    reduction,
    unpool,
    window,
)

aten = torch.ops.aten


def by_tag(flow: Flow, op: Op) -> None:
    """Point-wise by torch's own tag, harmless without labels, else frozen with the reason."""
    if torch.Tag.pointwise in op.func.tags:
        return pointwise(flow, op)
    if torch.Tag.reduction in op.func.tags:
        return reduction(flow, op)
    if str(op.func._schema.name) in _PER_CHANNEL:
        return flow.set(op.outs[0], [x for x in flow.layers(op.args[0]) if support(x) == (1,)])
    labelled = [value for value in op.inputs() if flow.layers(value)]
    for value in labelled:
        flow.freeze(value, f"channels cannot be followed through {op.func} in {op.where}")
    if labelled and flow.labels.binding:
        flow.unknown.setdefault(str(op.func), op.where)


_PER_CHANNEL = ("torchvision::roi_align", "torchvision::roi_pool")  # (images, boxes, ...)


def _table() -> dict[Any, Rule]:
    kinds: dict[Rule, str] = {
        pointwise: "_prelu_kernel native_dropout where hardswish hardswish_ hardtanh hardtanh_ "
        "leaky_relu leaky_relu_ elu elu_ relu relu_ silu silu_ gelu mish mish_ hardsigmoid "
        "hardsigmoid_ softplus log_sigmoid_forward "
        "rrelu_with_noise rrelu_with_noise_ rsub masked_fill masked_fill_",
        write: "copy_",
        same: "clone detach alias contiguous _to_copy lift_fresh detach_ to",
        view: "view _unsafe_view reshape flatten unflatten",
        expand: "expand",
        movement: "permute transpose t unsqueeze unbind pixel_shuffle "
        "pixel_unshuffle repeat flip movedim swapaxes transpose_ swapaxes_ t_ unsqueeze_ "
        "repeat_interleave",
        squeeze: "squeeze squeeze_",
        cut: "slice split_with_sizes",
        select: "select",
        roll: "roll",
        slide: "unfold",
        restride: "as_strided as_strided_",
        shuffle: "channel_shuffle native_channel_shuffle",
        split: "split unsafe_split",
        cat: "cat",
        stack: "stack",
        pad: "constant_pad_nd",
        pick: "index",
        gather: "gather",
        scatter_add: "scatter_add scatter_add_",
        put: "index_put index_put_ _index_put_impl_",
        add_rows: "index_add index_add_",
        pick_along: "index_select",
        embedding: "embedding _embedding_bag _embedding_bag_forward_only",
        create: "zeros ones full empty rand randn new_zeros new_ones new_full new_empty "
        "scalar_tensor",
        create_like: "zeros_like ones_like full_like empty_like rand_like randn_like",
        fill: "zero_ fill_ bernoulli_ uniform_ normal_ random_",
        reduction: "mean sum amax amin max min var std var_mean std_mean prod any all argmax "
        "argmin norm linalg_vector_norm logsumexp _safe_softmax _softmax _log_softmax cumsum "
        "sort topk median nanmedian mode kthvalue cummax cummin cumprod logcumsumexp",
        window: "max_pool2d_with_indices max_pool3d_with_indices max_pool1d max_pool2d max_pool3d "
        "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
        "adaptive_avg_pool1d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d "
        "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_nearest_exact1d _upsample_nearest_exact3d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa _upsample_lanczos2d_aa reflection_pad1d reflection_pad2d "
        "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d grid_sampler_2d "
        "grid_sampler_3d",
        patches: "im2col col2im",
        unpool: "max_unpool2d max_unpool3d",
        glu: "glu",
        channel_norm: "native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
        "_batch_norm_with_update _native_batch_norm_legit_no_training _batch_norm_no_update",
        group_norm: "native_group_norm",
        layer_norm: "native_layer_norm _fused_rms_norm",
        convolution: "convolution cudnn_convolution",
        matmul: "mm addmm bmm baddbmm",
        matvec: "mv addmv dot vdot",
        attention: "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    }
    table: dict[Any, Rule] = {}
    for rule, names in kinds.items():
        for name in names.split():
            if hasattr(aten, name):
                table[getattr(aten, name)] = rule
    del table[aten.max], table[aten.min]
    table[aten.max.dim] = table[aten.min.dim] = reduction
    table[aten.max.other] = table[aten.min.other] = pointwise
    return table


RULES: Mapping[Any, Rule] = _table()
