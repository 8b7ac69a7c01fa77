"""Train an image classifier: `train.py` tells the story, `config.py` lists the knobs."""
