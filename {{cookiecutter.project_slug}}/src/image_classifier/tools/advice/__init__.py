"""What would help next: which classes are confused, and a learning curve."""
