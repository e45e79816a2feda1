"""Hypothesis without deadlines: a busy host is no failure."""

import os

import hypothesis

hypothesis.settings.register_profile("unit", deadline=None)
hypothesis.settings.register_profile("unit-ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("unit-ci" if os.environ.get("CI") else "unit")
