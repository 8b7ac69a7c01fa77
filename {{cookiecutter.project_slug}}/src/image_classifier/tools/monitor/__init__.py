"""What a run says of its speed and its set-up: sanity checks, bottleneck, MFU, GPU readings."""
