"""Marks for cases of parametrized tests."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case that runs with the slow tests only, beside a short one that stays."""
    return pytest.param(*values, marks=pytest.mark.slow)
