"""The table from operation to rule. An operation without a rule freezes the channels it touches.

Channels are never cut on a guess: operations without a rule are listed in `graph.unknown`, with the
module and source line where they occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ...tracing.tape import Op
from ..labels import support
from ..propagation import Flow, Rule
from ..reasons import unknown_operation
from .contractions import convolution, matmul, matvec
from .elementwise import create, create_like, fill, pointwise, write
from .indexing import embedding, gather, index, index_add, index_put, index_select, scatter_add
from .movement import (
    cat,
    cut,
    expand,
    movement,
    pad,
    restride,
    roll,
    same,
    select,
    shuffle,
    split,
    squeeze,
    stack,
    unfold,
    view,
)
from .products import attention
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
_PER_CHANNEL = ("torchvision::roi_align", "torchvision::roi_pool")  # of (images, boxes, ...)


def by_tag(flow: Flow, op: Op) -> None:
    """Choose a rule by torch's own tags; without a tag, freeze the channels of all inputs."""
    if torch.Tag.pointwise in op.func.tags:
        return pointwise(flow, op)
    if torch.Tag.reduction in op.func.tags:
        return reduction(flow, op)
    if str(op.func._schema.name) in _PER_CHANNEL:
        return flow.set(op.outs[0], [x for x in flow.layers(op.args[0]) if support(x) == (1,)])
    labelled = [value for value in op.inputs() if flow.layers(value)]
    for value in labelled:
        flow.freeze(value, unknown_operation(op))
    if labelled:
        flow.note_unknown(op)


def _table() -> dict[object, Rule]:
    """Return the table, by overload packet. Operations that this torch lacks are left out."""
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
        unfold: "unfold",
        restride: "as_strided as_strided_",
        shuffle: "channel_shuffle native_channel_shuffle",
        split: "split unsafe_split",
        cat: "cat",
        stack: "stack",
        pad: "constant_pad_nd",
        index: "index",
        gather: "gather",
        scatter_add: "scatter_add scatter_add_",
        index_put: "index_put index_put_ _index_put_impl_",
        index_add: "index_add index_add_",
        index_select: "index_select",
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
    table: dict[object, Rule] = {}
    for rule, names in kinds.items():
        for name in names.split():
            if hasattr(aten, name):
                table[getattr(aten, name)] = rule
    del table[aten.max], table[aten.min]
    table[aten.max.dim] = table[aten.min.dim] = reduction
    table[aten.max.other] = table[aten.min.other] = pointwise
    return table


RULES: Final[Mapping[object, Rule]] = _table()
