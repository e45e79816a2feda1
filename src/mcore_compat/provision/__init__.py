"""Make or find environments, and verify that they are the ones asked for."""
