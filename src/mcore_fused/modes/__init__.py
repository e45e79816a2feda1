"""Which of the two modes a model gets, and both modes."""
