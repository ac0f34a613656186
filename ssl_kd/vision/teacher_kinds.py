"""List the kinds of image teachers: the names that choose a kind, and the function that loads it.

To add a kind, write its function in `ssl_kd/vision/teachers/`, and add an entry to `KINDS`. The
setting TEACHER, its help and its messages follow. Nothing is imported here, so that
`python train.py --help` works without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ssl_kd.core.settings.import_paths import IMPORT_PATH

_SIZES = {"s": "small", "b": "base", "l": "large", "g": "giant"}
DINOV2_MODELS = {
    f"dinov2_vit{letter}14{reg}": f"vit_{size}_patch14{'_reg4' if reg else ''}_dinov2.lvd142m"
    for letter, size in _SIZES.items()
    for reg in ("", "_reg")
}
"""Maps the name of each DINOv2 model on torch.hub to its name in timm."""


@dataclass(frozen=True)
class Kind:
    """A kind of image teachers.

    Attributes:
        loader: import path of the function that loads a teacher of this kind. Its argument is a
            `ssl_kd.vision.teachers.request.Request`.
        names: values of TEACHER that choose this kind, as help and messages list them.
        form: further values, as messages show them and as a regular expression.
        more: values of that form that are suggested for a misspelt name.
        packages: packages that the kind needs, which the extra `extra` of ssl_kd installs.
        extra: name of that extra.
    """

    loader: str
    names: tuple[str, ...] = ()
    form: tuple[str, str] | None = None
    more: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    extra: str = ""

    def has(self, name: str) -> bool:
        """Return whether a value of TEACHER chooses this kind."""
        return name in self.names or (
            self.form is not None and re.fullmatch(self.form[1], name) is not None
        )


_TEACHERS = "ssl_kd.vision.teachers"
_NETWORK = {"packages": ("timm", "torchvision"), "extra": "vision"}

KINDS = (
    Kind(f"{_TEACHERS}.plain.load_pixels", ("pixels",)),
    Kind(f"{_TEACHERS}.plain.load_features", ("features",)),
    Kind(
        f"{_TEACHERS}.dinov2.load_dinov2",
        ("dinov2",),
        ("dinov2_vitX14", "dinov2_vit[sblg]14(_reg)?"),
        tuple(DINOV2_MODELS),
        **_NETWORK,
    ),
    Kind(
        f"{_TEACHERS}.efficientnet_lite.load_lite",
        tuple(f"efficientnet_lite{size}" for size in range(3)),
        **_NETWORK,
    ),
    Kind(f"{_TEACHERS}.imported.load_imported", form=IMPORT_PATH),
    Kind(f"{_TEACHERS}.timm_models.load_timm", form=("timm:NAME", "timm:.+"), **_NETWORK),
    Kind(
        f"{_TEACHERS}.torchvision_models.load_torchvision",
        form=("torchvision:NAME", "torchvision:.+"),
        **_NETWORK,
    ),
)
