"""One run from plan to report."""
