"""Helpers of the GPU checks."""
