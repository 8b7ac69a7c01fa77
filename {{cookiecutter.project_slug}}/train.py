"""Train: `python train.py [PRESET] [--FLAG VALUE ...]`, or with `torchrun ... train.py ...`."""

import sys

from image_classifier.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
