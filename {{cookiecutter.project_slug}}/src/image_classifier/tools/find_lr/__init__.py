"""The command `find-lr`: suggests a learning rate."""
