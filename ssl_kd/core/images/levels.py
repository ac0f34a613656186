"""Find which values of images with more than 8 bits are black and white."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import Self

SIXTEEN_BITS = (0.0, 65535.0)
NATURAL_WHITES = (1.0, 255.0, 65535.0)
"""Values of white that files of floats usually have."""
FEWEST_BITS = 8


@dataclass(frozen=True)
class Extremes:
    """The smallest and largest value of an image with more than 8 bits."""

    low: float
    high: float
    is_float: bool
    container: float = math.inf  # largest value that its file can hold

    @property
    def uses_all_bits(self) -> bool:
        """Whether the image needs all 16 bits of its file."""
        return self.container == SIXTEEN_BITS[1] and self.high > SIXTEEN_BITS[1] / 2


@dataclass(frozen=True)
class Levels:
    """The values of black and white in a data set; None: those of each image's own file.

    Cameras and microscopes write 10 to 14 bits into files of 16, and floats of any range. One
    range for all images of a data set keeps their brightness comparable.
    """

    integers: tuple[float, float] | None = None
    floats: tuple[float, float] | None = None

    @classmethod
    def of(cls, images: Iterable[Extremes]) -> Self:
        """Return the levels that suit all images of a data set.

        White is the largest value of as many bits as the largest value in the data has, at least 8;
        for floats it is 1, 255 or 65535 if the largest value is in the upper half of that range,
        and otherwise the largest value. Negative values, and integers above 65535, are stretched
        from the smallest to the largest.
        """
        images = list(images)
        integers = [image for image in images if not image.is_float]
        floats = [image for image in images if image.is_float]
        of_integers = _integer_levels(integers) if integers else None
        if of_integers == SIXTEEN_BITS and all(i.container == SIXTEEN_BITS[1] for i in integers):
            of_integers = None  # what each file would use
        of_floats = _float_levels(floats) if floats else None
        return cls(of_integers, None if of_floats == (0.0, 1.0) else of_floats)

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> Self:
        """Return the levels that `to_dict` described; None stands for those of each image."""
        pairs = {
            name: pair and (float(pair[0]), float(pair[1])) for name, pair in (values or {}).items()
        }
        return cls(**pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return the levels as plain values, for the files of a run."""
        return asdict(self)

    def __str__(self) -> str:
        parts = []
        for name, pair in asdict(self).items():
            if pair is not None:
                parts.append(f"{name} from {pair[0]:g} (black) to {pair[1]:g} (white)")
        return f"values of more than 8 bits: {' and '.join(parts)}" if parts else ""


def _integer_levels(images: list[Extremes]) -> tuple[float, float]:
    low, high = min(image.low for image in images), max(image.high for image in images)
    if low < 0 or high > SIXTEEN_BITS[1]:
        return low, high
    bits = max(FEWEST_BITS, int(high).bit_length())
    return 0.0, float(2**bits - 1)


def _float_levels(images: list[Extremes]) -> tuple[float, float]:
    low, high = min(image.low for image in images), max(image.high for image in images)
    if low < 0:
        return low, high
    natural = next((white for white in NATURAL_WHITES if white / 2 < high <= white), None)
    return 0.0, natural or high or 1.0
