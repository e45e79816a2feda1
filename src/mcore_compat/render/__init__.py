"""Formats of one result model: HTML, SARIF, JUnit, GitHub annotations."""
