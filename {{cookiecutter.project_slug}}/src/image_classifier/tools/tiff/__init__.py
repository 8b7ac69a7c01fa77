"""TIFF files of other channels and of 16-bit colors, and NumPy's `.npy`."""
