"""`--augment.cutout`: a square of each training image is blanked."""
