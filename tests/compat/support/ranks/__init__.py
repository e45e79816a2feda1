"""What a rank does in the checks of several ranks; module-level functions, so that they can be sent to a rank."""
