"""A program beside each file, to begin with: it uses the file, and nothing of this package."""

START = {
    "onnx": '''\
"""What model.onnx sees in images: python example_onnx.py IMAGE ...

Needs onnxruntime, numpy and pillow.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(Path(__file__).with_name("model.onnx"))
about = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
''',
    "pt2": '''\
"""What model.pt2 sees in images: python example_pt2.py IMAGE ...

Needs torch, numpy and pillow. Open no pt2 file of a stranger: it may hold code, which would run.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

extra = {"about.json": ""}
program = torch.export.load(Path(__file__).with_name("model.pt2"), extra_files=extra).module()
about = json.loads(extra["about.json"])
''',
}
OPEN = """
for name in sys.argv[1:]:
    with Image.open(name) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
"""
PIXELS = """\
    images = np.array(upright)[None]  # (1, height, width, 3) uint8, of any size
"""
NORMALISED = """\
    square = ImageOps.fit(upright, (about["side"], about["side"]), Image.Resampling.BILINEAR)
    normal = (np.array(square) / 255 - about["mean"]) / about["std"]
    images = normal.transpose(2, 0, 1)[None].astype(np.float32)  # (1, 3, side, side)
"""
RUN = {
    "onnx": """\
    answers = session.run(None, {"images": images})[0][0]  # of the only image
""",
    "pt2": """\
    with torch.inference_mode():
        answers = program(torch.from_numpy(images))[0].numpy()  # of the only image
""",
}
SOFTMAX = """\
    answers = np.exp(answers - answers.max())
    answers /= answers.sum()
"""
TELL = """\
    print(ascii(name))
    for number in answers.argsort()[::-1][:5]:
        print(f"{answers[number]:8.2%}  {about['classes'][number]!a}")
"""


def example(name: str, is_raw: bool) -> str:
    """The program for the file of format `name`; empty where there is none."""
    if name not in START:
        return ""
    look, finish = (NORMALISED, SOFTMAX) if is_raw else (PIXELS, "")
    return START[name] + OPEN + look + RUN[name] + finish + TELL
