"""`--optim.teacher`: knowledge distillation, learning from the probabilities of a trained model."""
