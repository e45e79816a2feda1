"""Find the model below its wrappers, read its signatures, and change one instance only."""
