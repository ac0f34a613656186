"""List the kinds of teachers: the names that choose a kind, and the function that loads it.

To add a kind, write its function in `ssl_kd/vision/teachers/`, and add an entry to `KINDS`. The
setting TEACHER and its messages follow; its help, in `ssl_kd/vision/settings.py`, names the kind.
Nothing is imported here, so that `python train.py --help` works without torch.
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
TIMM_MODELS = {
    "dinov3_vits16": "vit_small_patch16_dinov3.lvd1689m",
    "dinov3_vits16plus": "vit_small_plus_patch16_dinov3.lvd1689m",
    "dinov3_vitb16": "vit_base_patch16_dinov3.lvd1689m",
    "dinov3_vitl16": "vit_large_patch16_dinov3.lvd1689m",
    "dinov3_vith16plus": "vit_huge_plus_patch16_dinov3.lvd1689m",
    "dinov3_vit7b16": "vit_7b_patch16_dinov3.lvd1689m",
    "dinov3_convnext_tiny": "convnext_tiny.dinov3_lvd1689m",
    "dinov3_convnext_small": "convnext_small.dinov3_lvd1689m",
    "dinov3_convnext_base": "convnext_base.dinov3_lvd1689m",
    "dinov3_convnext_large": "convnext_large.dinov3_lvd1689m",
    "siglip2_base": "vit_base_patch16_siglip_224.v2_webli",
    "siglip2_large": "vit_large_patch16_siglip_256.v2_webli",
    "siglip2_so400m": "vit_so400m_patch16_siglip_256.v2_webli",
    "pe_core_t16": "vit_pe_core_tiny_patch16_384.fb",
    "pe_core_s16": "vit_pe_core_small_patch16_384.fb",
    "pe_core_b16": "vit_pe_core_base_patch16_224.fb",
    "pe_core_l14": "vit_pe_core_large_patch14_336.fb",
    "pe_core_g14": "vit_pe_core_gigantic_patch14_448.fb",
    "pe_spatial_b16": "vit_pe_spatial_base_patch16_512.fb",
    "pe_spatial_l14": "vit_pe_spatial_large_patch14_448.fb",
    "c_radio_v3_b": "vit_base_patch16_radio_v3.c_radio",
    "c_radio_v3_l": "vit_large_patch16_radio_v3.c_radio",
    "c_radio_v3_h": "vit_huge_patch16_radio_v3.c_radio",
    "c_radio_v3_g": "vit_giant_patch16_radio_v3.c_radio",
    "c_radio_v4_so400m": "vit_so400m_patch16_radio_v4.c_radio",
    "c_radio_v4_h": "vit_huge_patch16_radio_v4.c_radio",
    "aimv2_large": "aimv2_large_patch14_224.apple_pt",
    "aimv2_huge": "aimv2_huge_patch14_224.apple_pt",
    "aimv2_1b": "aimv2_1b_patch14_224.apple_pt",
    "aimv2_3b": "aimv2_3b_patch14_224.apple_pt",
    "tipsv2_b14": "vit_base_patch14_reg1_tipsv2.webli",
    "tipsv2_l14": "vit_large_patch14_reg1_tipsv2.webli",
    "tipsv2_so400m14": "vit_so400m_patch14_reg1_tipsv2.webli",
    "tipsv2_g14": "vit_giant_patch14_reg1_tipsv2.webli",
    "clip_vitb32": "vit_base_patch32_clip_quickgelu_224.openai",
    "clip_vitb16": "vit_base_patch16_clip_quickgelu_224.openai",
    "clip_vitl14": "vit_large_patch14_clip_quickgelu_224.openai",
    "clip_vitl14_336": "vit_large_patch14_clip_quickgelu_336.openai",
}
"""Maps names of models, close to those that their authors use, to their names in timm."""
SHORT_NAMES = {
    "dinov3": "dinov3_vits16",
    "siglip2": "siglip2_base",
    "pe": "pe_core_b16",
    "radio": "c_radio_v3_b",
    "aimv2": "aimv2_large",
    "tipsv2": "tipsv2_b14",
    "clip": "clip_vitb16",
}
"""Maps the name of a family to one of its smaller models in `TIMM_MODELS`."""
TOKENS = {"class": 1, "patch": 1, "both": 2, "last4": 5, "patches": 1}
"""Maps the values of the setting TOKEN to the number of tokens that an embedding consists of."""


@dataclass(frozen=True)
class Kind:
    """A kind of teachers.

    Attributes:
        loader: import path of the function that loads a teacher of this kind. Its argument is a
            `ssl_kd.vision.teachers.request.Request`.
        names: values of TEACHER that choose this kind, as help and messages list them.
        more: further names, which messages suggest for a misspelt one but do not list.
        form: further values, as messages show them and as a regular expression.
        packages: packages that the kind needs, which the extra `extra` of ssl_kd installs.
        extra: name of that extra.
    """

    loader: str
    names: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    form: tuple[str, str] | None = None
    packages: tuple[str, ...] = ()
    extra: str = ""

    def has(self, name: str) -> bool:
        """Return whether a value of TEACHER chooses this kind."""
        if name in self.names or name in self.more:
            return True
        return self.form is not None and re.fullmatch(self.form[1], name) is not None


_TEACHERS = "ssl_kd.vision.teachers"
_ENCODER = {"packages": ("transformers",), "extra": "text"}
_NETWORK = {"packages": ("timm", "torchvision"), "extra": "vision"}

KINDS = (
    Kind(f"{_TEACHERS}.plain.load_pixels", ("pixels",)),
    Kind(f"{_TEACHERS}.plain.load_features", ("features",)),
    Kind(
        f"{_TEACHERS}.hub_models.load_dinov2",
        ("dinov2",),
        more=tuple(DINOV2_MODELS),
        **_NETWORK,
    ),
    Kind(
        f"{_TEACHERS}.timm_models.load_named",
        tuple(SHORT_NAMES),
        more=tuple(TIMM_MODELS),
        **_NETWORK,
    ),
    Kind(
        f"{_TEACHERS}.hub_models.load_franca",
        ("franca",),
        more=("franca_vitb14", "franca_vitl14", "franca_vitg14"),
        packages=("torchvision",),
        extra="vision",
    ),
    Kind(
        f"{_TEACHERS}.efficientnet_lite.load_lite",
        tuple(f"efficientnet_lite{size}" for size in range(3)),
        **_NETWORK,
    ),
    Kind(f"{_TEACHERS}.texts.load_minilm", ("minilm",), **_ENCODER),
    Kind(
        f"{_TEACHERS}.sounds.load_resemblyzer",
        ("resemblyzer",),
        packages=("transformers",),
        extra="audio",
    ),
    Kind(f"{_TEACHERS}.imported.load_imported", form=IMPORT_PATH),
    Kind(f"{_TEACHERS}.timm_models.load_timm", form=("timm:NAME", "timm:.+"), **_NETWORK),
    Kind(f"{_TEACHERS}.encoders.load_hf", form=("hf:NAME", "hf:.+"), **_ENCODER),
    Kind(
        f"{_TEACHERS}.open_clip_models.load_open_clip",
        form=("open_clip:NAME", "open_clip:.+"),
        packages=("open_clip", "torchvision"),
        extra="open_clip",
    ),
    Kind(
        f"{_TEACHERS}.torchvision_models.load_torchvision",
        form=("torchvision:NAME", "torchvision:.+"),
        **_NETWORK,
    ),
)
