"""The models that model_coverage.py measures: random weights, small inputs, nothing is downloaded.

`names()` lists them as library/model. `make(name)` imports only that library and returns the model
and its example inputs, which are as small as the model allows.
"""

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

from benchmarks.measure.import_torchvision import import_torchvision
from benchmarks.measure.recurrent_models import recurrent
from benchmarks.measure.transformers_models import TRANSFORMERS, make_transformers

Made = tuple[Any, Any]

# torchvision: image sizes where 64 pixels are too few, and options for detection on small images.
VISION_SIZE = {
    "maxvit": 224,
    "inception": 299,
    "raft": 128,
    "s3d": 209,
    "vit_h_14": 56,
    "ssd300": 300,
    "ssdlite320": 320,
    "rcnn": 96,
    "retinanet": 96,
    "fcos": 96,
}
ONE_STAGE = {"score_thresh": 0.0, "detections_per_img": 4, "topk_candidates": 16}
TWO_STAGE = {
    "rpn_pre_nms_top_n_test": 24,
    "rpn_post_nms_top_n_test": 12,
    "box_score_thresh": 0.0,
    "box_detections_per_img": 4,
    "rpn_nms_thresh": 1.0,
}

# timm: image sizes where 64 pixels are too few (batch norms would see two values), by a pattern of
# the name, and the smallest models of every family.
TIMM_SIZE = {
    "inception_(v|res)": 160,
    "deepseek|efficientformer_|halor": 224,
    "bat_|.*halo": 256,
    "efficientvim": 128,
}
TIMM = """
    bat_resnext26ts beit_base_patch16_224 beitv2_base_patch16_224 botnet26t_256 caformer_s18
    cait_xxs24_224 coat_lite_tiny coat_tiny coatnet_0_224 coatnet_nano_cc_224
    coatnet_pico_rw_224 coatnet_rmlp_nano_rw_224 coatnext_nano_rw_224 convformer_s18 convit_tiny
    convmixer_1024_20_ks9_p14 convmixer_768_32 convnext_atto convnext_atto_ols convnext_tiny
    convnext_tiny_hnf convnext_zepto_rms convnextv2_atto cpubone_nano crossvit_9_dagger_240
    crossvit_tiny_240 cs3darknet_focus_s cs3darknet_s cs3sedarknet_l csatv2 cspdarknet53
    cspresnet50 cspresnext50 davit_tiny deepseek_vit_412m deit3_small_patch16_224
    deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 densenet121 densenetblur121d dla34
    dla46_c dla46x_c dla60_res2net dla60_res2next dm_nfnet_f0 dpn48b dpn68 eca_botnext26ts_256
    eca_halonext26ts eca_nfnet_l0 eca_resnext26ts eca_vovnet39b ecaresnet26t ecaresnet50d_pruned
    ecaresnext26t_32x4d edgenext_small edgenext_xx_small efficientformer_l1 efficientformerv2_s0
    efficientnet_b0 efficientnet_b0_gn efficientnet_es efficientnet_lite0 efficientnetv2_rw_t
    efficientvim_m1 efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim ese_vovnet19b_slim_dw
    ese_vovnet39b_evos eva02_tiny_patch14_224 fasternet_t0 fastvit_mci0 fastvit_sa12 fastvit_t8
    fbnetc_100 fbnetv3_b flexivit_small focalnet_tiny_lrf focalnet_tiny_srf gcresnext26ts
    gcvit_xxtiny gemma4_vit_167m gernet_s ghostnet_050 ghostnetv2_100 ghostnetv3_050
    gmixer_12_224 gmlp_ti16_224 halonet26t halonet_h1 haloregnetz_b hardcorenas_a hardcorenas_f
    hgnet_tiny hgnetv2_b0 hiera_small_abswin_256 hiera_tiny_224 hieradet_small hrnet_w18_small
    hrnet_w18_small_v2 iformer_t inception_next_atto inception_next_tiny inception_resnet_v2
    inception_v3 inception_v4 lcnet_035 lcnetv2_small legacy_senet154 legacy_seresnet18
    legacy_seresnext26_32x4d legacy_xception levit_128s levit_conv_128s lowformer_b0
    mambaout_femto maxvit_pico_rw_256 mixer_s16_224 mixer_s32_224 mobilenetv3_large_100
    mobilenetv3_small_050 mobilenetv4_conv_aa_medium mobilenetv4_conv_blur_medium
    mobilenetv5_base mobileone_s0 mobileone_s1 mobilevit_xxs mobilevitv2_050 mvitv2_small_cls
    mvitv2_tiny naflexvit_base_patch16_gap nasnetalarge nest_tiny nest_tiny_jx nextvit_small
    nf_ecaresnet26 nf_regnet_b0 nf_resnet26 nf_seresnet26 pit_ti_224 pit_ti_distilled_224
    pnasnet5large poolformer_s12 poolformerv2_s12 pvt_v2_b0 pvt_v2_b2_li qwen3_vit_88m
    rdnet_tiny regnetv_040 regnetx_002 regnety_002 regnetz_005 repghostnet_050 repvit_m0_9
    repvit_m1 res2net50_14w_8s res2net50d res2next50 resmlp_12_224 resnest14d resnest26d
    resnest50d_4s2x40d resnet10t resnet18 resnet18d resnetv2_18 resnetv2_50 resnetv2_50d_evos
    resnetv2_50d_frn resnetv2_50d_gn resnetv2_50x1_bit rexnet_100 rexnetr_100 sam2_hiera_tiny
    samvit_base_patch16_224 selecsls42 selecsls60b sequencer2d_s shvit_s1 skresnet18
    skresnext50_32x4d starnet_s050 starnet_s1 swiftformer_xs swin_s3_tiny_224
    swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_cr_tiny_ns_224
    swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tnt_s_patch16_224 tresnet_m
    twins_pcpvt_small twins_svt_small vgg11 vgg11_bn visformer_tiny
    vit_dpwee_patch16_reg1_gap_256 vit_pe_core_tiny_patch16_384 vit_relpos_small_patch16_224
    vit_relpos_small_patch16_rpn_224 vit_small_patch14_reg4_dinov2 vit_small_patch16_rope_224
    vit_small_patch16_rope_mixed_224 vit_small_resnet26d_224 vit_srelpos_small_patch16_224
    vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 vovnet39a
    xception41 xception41p xcit_nano_12_p16_224 xcit_nano_12_p8_224
"""

SMP = [
    f"{network}-{encoder}"
    for network in ("deeplabv3plus", "fpn", "unet")
    for encoder in ("efficientnet-b0", "mobilenet_v2", "resnet18")
]
RNN = {"gru_speech": (16, 60), "lstm_tagger": (20,), "lstm_text": (20,)}  # and example inputs


def names() -> list[str]:
    """Return the names of all models, library by library."""
    lists = {
        "torchvision": import_torchvision().models.list_models(),
        "timm": TIMM.split(),
        "transformers": TRANSFORMERS,
        "diffusers": ("dit", "unet2d"),
        "smp": SMP,
        "ultralytics": ("yolo11n", "yolov8n"),
        "rnn": RNN,
    }
    return [f"{library}/{name}" for library, found in lists.items() for name in sorted(found)]


def make(name: str) -> Made:
    """Return the model of a name, and its example inputs."""
    library, _, model = name.partition("/")
    return MAKERS[library](model)


def kind(name: str, model: Any, example: Any) -> str:
    """Return the kind of a model: "conv", "transformer", "hybrid" or "other".

    A model with mostly layer norms is a transformer (or a mixer). It is a hybrid if convolutions
    take 10 % of its MACs or more: all channels of the residual stream remain where they read or
    write it, so 10 % + 90 % / 2 = 55 % of the MACs are left even if the rest is halved.
    """
    library, _, bare = name.partition("/")
    if library == "rnn":
        return "other"
    if re.match("(test_)?convnext|convformer|inception_next|mambaout|poolformer|rdnet", bare):
        return "conv"
    classes = "\n".join(type(module).__name__ for module in model.modules())
    layer = re.findall(r"LayerNorm|R[Mm][Ss]Norm|SimpleNorm|GroupNorm1|Affine$", classes, re.M)
    batch = re.findall(r"BatchNorm|GroupNorm(?!1)|EvoNorm|FilterResponse", classes)
    if 2 * len(layer) <= len(batch):
        return "conv"
    return "hybrid" if convolved(model, example) >= 0.1 else "transformer"


def convolved(model: Any, example: Any) -> float:
    """Return the share of the MACs in convolutions over more than one pixel."""
    from polarprune.tracing.recorder import record

    ops = record(model, example, training=False).ops
    convolutions = [op for op in ops if op.name == "convolution" and max(op.args[1].shape[2:]) > 1]
    return sum(op.macs for op in convolutions) / sum(op.macs for op in ops)


def make_torchvision(name: str) -> Made:
    """Return a model of torchvision and its example inputs."""
    import torch

    vision = import_torchvision().models
    kind = vision.get_model_builder(name).__module__.split(".")[2]
    size = next((size for key, size in VISION_SIZE.items() if key in name), 64)
    options: dict[str, Any] = {"weights": None}
    if kind in ("detection", "segmentation"):
        options["weights_backbone"] = None
    if kind == "detection":
        options |= TWO_STAGE if "rcnn" in name else ONE_STAGE
        options |= {} if "ssd" in name else {"min_size": size, "max_size": size}
        example: Any = ([torch.rand(3, size, size) for _ in range(1 if "ssd" in name else 2)],)
    elif kind == "optical_flow":  # two updates of the flow instead of twelve
        example = (torch.rand(2, 3, size, size), torch.rand(2, 3, size, size), 2)
    elif kind == "video":
        clips, frames = (1, 13) if name == "s3d" else (2, 8)
        example = torch.randn(clips, 3, frames, size, size)
    else:
        example = torch.randn(2, 3, size, size)
        options |= {"image_size": size} if name.startswith("vit") else {}
    with _small_mvit(size) if "mvit" in name else nullcontext():
        model = vision.get_model(name, **options)
    if kind == "optical_flow":
        model.register_forward_pre_hook(_grid_like_images)
    return model, example


def _small_mvit(size: int) -> Any:
    """Make the builders of MViT use small inputs: only the class takes their size."""
    from torchvision.models.video import mvit

    small = {"spatial_size": (size, size), "temporal_size": 8}
    build = mvit.MViT
    return mock.patch.object(mvit, "MViT", lambda **options: build(**{**options, **small}))


def _grid_like_images(model: Any, inputs: tuple[Any, ...]) -> None:
    """Give RAFT's grid of pixels, which is always float32, the dtype of the images."""
    from torchvision.models.optical_flow import _utils, raft

    raft.make_coords_grid = lambda *size: _utils.make_coords_grid(*size).to(inputs[0])


def make_timm(name: str) -> Made:
    """Return a model of timm and its example inputs."""
    import torch

    import_torchvision()
    import timm

    size = next((size for key, size in TIMM_SIZE.items() if re.match(key, name)), 64)
    settings = timm.models.get_pretrained_cfg(name)
    options: dict[str, Any] = {"depth": 4} if name.startswith("deepseek") else {}
    options["num_classes"] = 10  # without a head, the residual stream would be the output
    if settings.fixed_input_size and not name.startswith("crossvit"):
        options["img_size"] = size
    model = timm.create_model(name, pretrained=False, **options)
    for module in model.modules():
        if type(module).__name__ == "GPSA":
            module.register_forward_pre_hook(_distances_like_input)
    return model, torch.randn(2, 3, size, size)


def _distances_like_input(module: Any, inputs: tuple[Any, ...]) -> None:
    """Give ConViT's table, which keeps the dtype of its first run, the dtype of the input."""
    module.rel_indices = module.rel_indices.to(inputs[0])


def make_diffusers(name: str) -> Made:
    """Return a model of diffusers and its example inputs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_torchvision()
    import torch
    from diffusers import DiTTransformer2DModel, UNet2DModel

    steps = torch.tensor([3, 7])
    if name == "dit":
        model = DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=10,
            norm_num_groups=8,
        )
        image = torch.randn(2, 4, 8, 8)
        labels = torch.tensor([1, 2])
        return model, {"hidden_states": image, "timestep": steps, "class_labels": labels}
    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        attention_head_dim=8,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": torch.randn(2, 3, 16, 16), "timestep": steps}


def make_smp(name: str) -> Made:
    """Return a model of segmentation_models_pytorch and its example inputs."""
    import torch

    import_torchvision()
    import segmentation_models_pytorch as smp

    network, _, encoder = name.partition("-")
    model = smp.create_model(network, encoder, encoder_weights=None, classes=3)
    return model, torch.randn(2, 3, 64, 64)


def make_ultralytics(name: str) -> Made:
    """Return a model of ultralytics and its example inputs."""
    os.environ.setdefault("YOLO_OFFLINE", "true")
    os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())
    import torch

    import_torchvision()
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel(f"{name}.yaml", verbose=False), torch.rand(2, 3, 64, 64)


def make_rnn(name: str) -> Made:
    """Return a recurrent network and its example inputs."""
    import torch

    shape = RNN[name]
    words = torch.randint(0, 99, (2, *shape)) if len(shape) == 1 else torch.randn(2, *shape)
    return recurrent(name), words


MAKERS: dict[str, Callable[[str], Made]] = {
    "torchvision": make_torchvision,
    "timm": make_timm,
    "transformers": make_transformers,
    "diffusers": make_diffusers,
    "smp": make_smp,
    "ultralytics": make_ultralytics,
    "rnn": make_rnn,
}
