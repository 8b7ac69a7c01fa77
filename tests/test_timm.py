"""Which weights of timm's models decay, and which Muon turns: as timm itself has it."""

import timm
import torch
from image_classifier.checkpoints.pretrained import PretrainedWeights
from image_classifier.config import ModelConfig, OptimConfig
from image_classifier.models import build_model
from image_classifier.optim import build_optimizer
from timm.models import adapt_input_conv
from timm.optim import param_groups_weight_decay

FAMILIES = """
    beit_base_patch16_224 cait_xxs24_224 coatnet_0_224 convnext_atto convnextv2_atto
    crossvit_tiny_240 deit_tiny_distilled_patch16_224 efficientformer_l1 efficientnet_b0
    eva02_tiny_patch14_224 fastvit_t8 hiera_tiny_224 levit_128s maxxvit_rmlp_nano_rw_256
    mixer_s32_224 mobilenetv3_small_100 mobilenetv4_conv_small nfnet_l0 regnety_004
    resmlp_12_224 resnet50d swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tiny_vit_5m_224
    vit_relpos_small_patch16_224 vit_tiny_patch16_224 xcit_nano_12_p16_224
"""


def test_weights_are_grouped_as_timm_groups_them():
    for name in FAMILIES.split():
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=7)
        names = {weight: path for path, weight in model.named_parameters()}
        shapes = {path: list(weight.shape) for weight, path in names.items()}
        others = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=others)
        theirs = [names[w] for g in groups if g["weight_decay"] for w in g["params"]]
        optimizer = build_optimizer(OptimConfig(name="muon"), model)
        ours = [names[weight] for weight in optimizer.param_groups[0]["params"]]
        # timm lets some scales decay: one number for each channel, whatever their shape.
        scales = {path for path, (_, *rest) in shapes.items() if {*rest} <= {1}}
        scales |= {path for path, shape in shapes.items() if shape[:2] == [1, 1]}
        assert ours == [path for path in theirs if path not in scales], name
        # Muon leaves out the layers that timm calls first and last, and grouped convolutions.
        layers = model.named_modules()
        grouped = {f"{path}.weight" for path, layer in layers if getattr(layer, "groups", 1) > 1}
        ends = [model.pretrained_cfg["first_conv"], model.pretrained_cfg["classifier"]]
        ends = [end for part in ends for end in ([part] if isinstance(part, str) else part)]
        left = {*ours} - {names[weight] for weight in optimizer.hidden}
        assert left - grouped == {f"{end}.weight" for end in ends}, name


def test_filters_for_colors_are_adapted_as_timm_adapts_them():
    name = ModelConfig(name="timm/test_resnet")
    weights = PretrainedWeights("weights", build_model(name, 2, 32).state_dict())
    for channels in (1, 2, 5, 6):
        model = build_model(name, 2, 32, channels=channels)
        assert "adapted from 3 channels: " in weights.load_into(model, ("a", "b"))
        found = next(filter(lambda weight: weight.ndim == 4, model.state_dict().values()))
        stem = next(filter(lambda weight: weight.ndim == 4, weights.weights.values()))
        torch.testing.assert_close(found, adapt_input_conv(channels, stem))
