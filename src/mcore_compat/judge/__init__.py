"""Turn what is known about a cell into a verdict. Pure."""
