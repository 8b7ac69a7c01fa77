"""Which weights of timm's models decay, and which Muon turns: as timm itself has it."""

import json

from conftest import python

FAMILIES = """
    beit_base_patch16_224 cait_xxs24_224 coatnet_0_224 convnext_atto convnextv2_atto
    crossvit_tiny_240 deit_tiny_distilled_patch16_224 efficientformer_l1 efficientnet_b0
    eva02_tiny_patch14_224 fastvit_t8 hiera_tiny_224 levit_128s maxxvit_rmlp_nano_rw_256
    mixer_s32_224 mobilenetv3_small_100 mobilenetv4_conv_small nfnet_l0 regnety_004
    resmlp_12_224 resnet50d swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tiny_vit_5m_224
    vit_relpos_small_patch16_224 vit_tiny_patch16_224 xcit_nano_12_p16_224
"""

STORY = """
import json, sys
sys.path.insert(0, "src")

import timm, torch
from timm.optim import param_groups_weight_decay

from image_classifier.config import OptimConfig
from image_classifier.optim import build_optimizer

found = {}
for name in sys.argv[1:]:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=7)
    names = {weight: path for path, weight in model.named_parameters()}
    theirs = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay()
        if hasattr(model, "no_weight_decay") else ())
    ours = build_optimizer(OptimConfig(name="muon"), model)
    found[name] = {
        "shapes": {path: list(weight.shape) for weight, path in names.items()},
        "ours": [names[w] for w in ours.param_groups[0]["params"]],
        "theirs": [names[w] for g in theirs if g["weight_decay"] for w in g["params"]],
        "hidden": [names[w] for w in ours.hidden],
        "grouped": [path + ".weight" for path, layer in model.named_modules()
                    if isinstance(layer, torch.nn.Conv2d) and layer.groups > 1],
        "ends": [model.pretrained_cfg["first_conv"], model.pretrained_cfg["classifier"]],
    }
print(json.dumps(found))
"""


def test_weights_are_grouped_as_timm_groups_them() -> None:
    for name, found in json.loads(python("-c", STORY, *FAMILIES.split())).items():
        # timm lets some scales decay: one number for each channel, whatever their shape.
        scales = {path for path, (_, *rest) in found["shapes"].items() if {*rest} <= {1}}
        scales |= {path for path, shape in found["shapes"].items() if shape[:2] == [1, 1]}
        assert found["ours"] == [path for path in found["theirs"] if path not in scales], name
        # Muon leaves out the layers that timm calls first and last.
        ends = [
            end for ends in found["ends"] for end in ([ends] if isinstance(ends, str) else ends)
        ]
        left = {path for path in found["ours"] if path not in found["hidden"]}
        assert left - {*found["grouped"]} == {f"{end}.weight" for end in ends}, name
