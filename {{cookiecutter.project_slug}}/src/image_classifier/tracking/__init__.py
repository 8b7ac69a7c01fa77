"""What a run says of itself."""
