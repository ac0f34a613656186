"""Format numbers as the report writes them."""

import math
from typing import Any, TypeGuard

DASH = "–"


def finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number, neither infinite nor NaN."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def percent(share: float) -> str:
    """Return a fraction in percent, with one decimal."""
    return f"{100 * share:.1f}"


def number(value: Any) -> str:
    """Return a number with four significant digits, a dash for None, anything else as text."""
    return f"{value:.4g}" if finite(value) else DASH if value is None else str(value)


def amount(value: float) -> str:
    """Return a number with four digits, or with thousands separators if large: 12.35, 50,257."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def facts(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as text; leave out None, and write NaN as a dash."""
    pairs = []
    for key, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name}: {number(one)}" for name, one in value.items())
        text = amount(value) if finite(value) else DASH if isinstance(value, float) else str(value)
        pairs += [(key.replace("_", " "), text)] if value is not None else []
    return pairs


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: `3.0 s`, `80 s`, `12 min`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def base_name(name: Any) -> str:
    """Return the name of a data set for the headline: its last part if it is a path."""
    return str(name).rstrip("/\\").replace("\\", "/").rpartition("/")[2] or str(name)
