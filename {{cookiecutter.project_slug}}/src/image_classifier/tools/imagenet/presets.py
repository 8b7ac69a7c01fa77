"""ImageNet, from published recipes: schedules are tested, accuracy is not reproduced."""

from dataclasses import replace

from ...config import AugmentConfig, Config, DataConfig, ModelConfig, OptimConfig
from ...extensions import need_tool


def imagenet_rn50_16() -> Config:
    """ImageNet, ResNet-50; published: 73.8 % in 15 minutes on 8 A100s; not reproduced here."""
    # https://github.com/libffcv/ffcv-imagenet, rn50_configs/rn50_16_epochs.yaml. There each of 8
    # GPUs has a batch of 512, momentum is not Nesterov's, images are blurred before each strided
    # convolution (timm/resnetblur50), grow from 11/16 to 13/16 of the run, and a test sees the
    # middle 7/8 of an image. With a smaller batch, lower the learning rate in proportion.
    need_tool("options", "progressive-resizing", "imagenet_rn50_*")
    return Config(
        epochs=16,
        data=DataConfig(
            name="folder", root="imagenet", image_size=192, test_size=256, batch_size=4096
        ),
        augment=AugmentConfig(crop="resized", min_scale=0.08, min_size=160, tta="flip"),
        model=ModelConfig(name="resnet50"),
        optim=OptimConfig(
            lr=1.7, weight_decay=1e-4, schedule="linear", warmup_epochs=2, label_smoothing=0.1
        ),
    )


def imagenet_rn50_88() -> Config:
    """ImageNet, ResNet-50; published: 78.4 % in 77 minutes on 8 A100s; not reproduced here."""
    return replace(imagenet_rn50_16(), epochs=88)


def imagenet_vit_s() -> Config:
    """ImageNet, ViT-S/16; published: 76.5 % in 6 to 7 hours on a TPUv3-8; not reproduced here."""
    # https://arxiv.org/abs/2205.01580, and big_vision's configs/vit_s16_i1k.py. There the head has
    # a hidden layer, and a test sees the middle 7/8 of an image.
    need_tool("options", "policies", "imagenet_vit_s")
    need_tool("options", "mixup", "imagenet_vit_s")
    return Config(
        epochs=90,
        data=DataConfig(name="folder", root="imagenet", image_size=224, batch_size=1024),
        augment=AugmentConfig(
            crop="resized",
            min_scale=0.05,
            policy="randaugment-m30-n2",  # RandAugment(2, 10): magnitudes go to 10 there, 30 here
            mixup=0.2,
        ),
        model=ModelConfig(name="vit_s"),
        optim=OptimConfig(
            name="adamw",
            lr=1e-3,
            weight_decay=0.1,  # 1e-4, which there is not multiplied by the learning rate
            warmup_epochs=8,  # 10,000 steps
            clip_norm=1.0,
        ),
    )


PRESETS = imagenet_rn50_16, imagenet_rn50_88, imagenet_vit_s
