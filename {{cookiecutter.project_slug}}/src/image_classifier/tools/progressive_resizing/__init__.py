"""`--augment.min-size`: training begins with small images, which is faster."""
