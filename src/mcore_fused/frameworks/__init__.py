"""Forward functions with the signatures that RL frameworks call."""
