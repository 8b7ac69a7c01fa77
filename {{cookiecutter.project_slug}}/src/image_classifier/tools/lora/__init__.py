"""`--model.lora-rank`: fine-tuning in which each matrix learns only a product of two thin ones."""
