"""`--data.balance`: rare classes are seen as often as others, or count for more."""
