"""Train: `python train.py [PRESET] [--FLAG VALUE ...]`, or with `torchrun ... train.py ...`."""

import sys
from pathlib import Path

# The code beside this file, also where nothing or another copy of it is installed.
sys.path.insert(0, str(Path(__file__).parent / "src"))

from image_classifier.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
