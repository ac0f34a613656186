"""How the report writes numbers."""

import math
from typing import Any, TypeGuard

DASH = "–"


def finite(value: Any) -> TypeGuard[float]:
    """Whether it is a number, neither infinite nor NaN."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.1f}"


def number(value: Any) -> str:
    """A number to four digits; a dash for None; anything else as it is."""
    return f"{value:.4g}" if finite(value) else DASH if value is None else str(value)


def amount(value: float) -> str:
    """Four digits, or a whole number with its thousands set apart: 12.35, 50,257."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def facts(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as text, without those that are None; a dash for a NaN."""
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name}: {number(one)}" for name, one in value.items())
        text = amount(value) if finite(value) else DASH if isinstance(value, float) else str(value)
        found += [(key.replace("_", " "), text)] if value is not None else []
    return found


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def base_name(name: Any) -> str:
    """A data set's name for the headline: the last part where it is a path."""
    return str(name).rstrip("/\\").replace("\\", "/").rpartition("/")[2] or str(name)
