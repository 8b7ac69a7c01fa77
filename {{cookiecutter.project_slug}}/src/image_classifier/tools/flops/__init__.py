"""FLOPs of an image, and the share of the device's peak that a run uses (MFU)."""
