"""Run a suite in one cell and collect what it leaves."""
