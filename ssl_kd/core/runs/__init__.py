"""Runs: one folder each, resumed bit for bit, stopped between two steps."""
