"""What takes the memory of the device when it runs out."""
