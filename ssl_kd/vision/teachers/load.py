"""Load a frozen image teacher by its name in the settings."""

from __future__ import annotations

import logging
import os
import pkgutil
from typing import Any

import torch

from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.vision.settings import AUTO, TeacherSettings
from ssl_kd.vision.teacher_kinds import KINDS
from ssl_kd.vision.teachers.base import Teacher
from ssl_kd.vision.teachers.choose import choose_teacher
from ssl_kd.vision.teachers.request import Request

logger = logging.getLogger(__name__)


def load_teacher(
    name: str,
    *,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    token: str = "class",
    device: str | torch.device = "cpu",
    dataset: Any = None,
) -> Teacher:
    """Load a frozen teacher.

    Args:
        name: value of the setting TEACHER, as in `pixels`, `features`, `dinov2`,
            `efficientnet_lite0`, `timm:<model>`, `torchvision:<model>`, or the import path of a
            subclass of `Teacher`. `ssl_kd.vision.teacher_kinds.KINDS` lists all of them; `auto` is
            what `choose_teacher` chooses for `dataset`.
        weights: local file to use instead of a download: a state dict, or a checkpoint with it in
            known wrappers (`select_weights`). It must cover the model except for the classifier.
        image_size: side of the input in pixels. By default the model's own size; 224 for DINOv2;
            for `pixels` the size of the images in `dataset`, or 32 if they are files.
        token: `class` (the class token, or the network's own pooling), `patch` (the mean of the
            patch tokens, without registers), `both` (concatenated) or `last4` (the class tokens of
            the last four layers, and the mean patch), or `patches` (all patch tokens, with which
            `Teacher.grid` is set). All but `class` need a ViT.
        device: device on which the teacher runs.
        dataset: data to embed, which decides what `auto` is, the input shape of `pixels` and the
            width of `features`.

    Raises:
        InputError: an argument is invalid.
        MissingPackage: the teacher needs a package that is not installed.
        TeacherUnavailable: the weights cannot be downloaded.
    """
    for setting, value in (("teacher", name), ("token", token), ("image_size", image_size)):
        TeacherSettings.check(setting, value)
    if name == AUTO:
        name, reason = choose_teacher(dataset)
        logger.info("TEACHER auto is %s: %s; --teacher sets another", name, reason)
    kind = next(kind for kind in KINDS if kind.has(name))
    check_installed(kind.packages, kind.extra, f"TEACHER {name!r}")
    load = pkgutil.resolve_name(kind.loader)
    teacher: Teacher = load(Request(name, weights, image_size, token, dataset))
    teacher.setting = name
    return teacher.to(device)
