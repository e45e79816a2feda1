"""Implementations that a suite can judge."""
