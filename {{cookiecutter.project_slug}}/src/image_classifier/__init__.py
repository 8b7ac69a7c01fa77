"""Train an image classifier: `train.py` tells the story, `config.py` lists the knobs."""

import time

STARTED = time.monotonic()  # when this program began to import, for what its start-up took
