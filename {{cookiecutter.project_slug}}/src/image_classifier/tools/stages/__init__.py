"""The parts of a network, in their order: for tools that treat each in another way."""
