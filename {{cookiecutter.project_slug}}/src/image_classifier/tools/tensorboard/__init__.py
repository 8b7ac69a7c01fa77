"""The tracker TensorBoard, which runs use by default."""
