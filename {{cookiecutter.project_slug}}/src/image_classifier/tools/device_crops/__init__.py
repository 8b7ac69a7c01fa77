"""`--augment.crop resized` with `--data.where device` or `host`: the device cuts the crops."""
