"""From files to batches on the device."""
