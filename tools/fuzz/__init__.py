"""Hostile input, thousands of times: ``python -m tools.fuzz``."""
