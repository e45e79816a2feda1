"""Formats of one result model: a screen of text, Markdown, HTML, SARIF, JUnit, GitHub annotations."""
