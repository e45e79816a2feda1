"""Find the model below its wrappers, and change one instance only."""
