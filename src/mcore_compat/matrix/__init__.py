"""Everything that is read from the data folder: cells, checks, exceptions, selection."""
