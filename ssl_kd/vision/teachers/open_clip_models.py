"""Load the image towers of open_clip."""

from __future__ import annotations

from typing import Any, Literal

from ssl_kd.core.errors import InputError, brief
from ssl_kd.vision.teachers.base import Teacher
from ssl_kd.vision.teachers.hugging_face import offline_without_network, unavailable
from ssl_kd.vision.teachers.messages import unknown_model
from ssl_kd.vision.teachers.network import Network, Transform
from ssl_kd.vision.teachers.request import Request


def load_open_clip(request: Request) -> Teacher:
    """Load `open_clip:MODEL/WEIGHTS`, `open_clip:hf-hub:OWNER/NAME` or `open_clip:local-dir:PATH`.

    An embedding is the projection of an image into the space that images and texts share, not
    normalized.
    """
    import open_clip  # pyright: ignore[reportMissingImports]

    if request.token != "class":
        raise InputError(
            f"TOKEN is {request.token!r}, but {request.name} gives its image embedding alone: set "
            "it to 'class'"
        )
    # Of a file alone it is unknown which activation the weights were trained with.
    request.refuse_weights("has its own; a local model is open_clip:local-dir:FOLDER")
    name, tag = request.model, None
    if not name.startswith(("hf-hub:", "local-dir:")):
        name, _, tag = name.partition("/")
        _check_name(name, tag)
    options = {} if request.image_size is None else {"force_image_size": request.image_size}
    try:
        with offline_without_network():
            model: Any = open_clip.create_model(name, pretrained=tag, **options)
    except (OSError, RuntimeError) as error:
        raise unavailable(request.name, error) from error
    except ValueError as error:
        raise InputError(f"{request.name} cannot be loaded: {brief(error, 400)}") from error
    transform = open_clip_transform(model.visual.preprocess_cfg)
    return Network(request.name, model, model.encode_image, transform)


def _check_name(name: str, tag: str) -> None:
    import open_clip  # pyright: ignore[reportMissingImports]

    if name not in open_clip.list_models():
        raise InputError(unknown_model("open_clip", name, open_clip.list_models()))
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag.lower() not in [known.lower() for known in tags]:
        raise InputError(
            f"open_clip has no weights {tag!r} of {name}; expected open_clip:{name}/WEIGHTS, with "
            f"one of: {', '.join(tags) or 'none'}"
        )


def open_clip_transform(config: dict[str, Any]) -> Transform:
    """Return the preprocessing of an image tower for its `preprocess_cfg`."""
    size = config["size"]
    height, width = (size, size) if isinstance(size, int) else size
    modes: dict[str, Literal["center", "squash", "border"]] = {
        "shortest": "center",
        "squash": "squash",
        "longest": "border",
    }
    return Transform(
        size=height if height == width else (height, width),
        resize=height if height == width else (height, width),
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        crop_mode=modes[config["resize_mode"]],
    )
