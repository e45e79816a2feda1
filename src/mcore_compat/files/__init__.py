"""Small helpers for files."""
