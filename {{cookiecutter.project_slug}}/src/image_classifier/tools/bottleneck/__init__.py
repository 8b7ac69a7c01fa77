"""What limits the speed of a run, in a sentence after each epoch."""
