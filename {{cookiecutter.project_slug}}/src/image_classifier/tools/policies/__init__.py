"""`--augment.policy`: TrivialAugment and RandAugment, on the device."""
