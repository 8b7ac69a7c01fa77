"""`--model.head layers`: a last layer that sees features of several depths."""
