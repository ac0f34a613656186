"""Load the image models of transformers, from the Hugging Face Hub or from a folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from PIL import Image
from torch import Tensor, nn

from ssl_kd.core.errors import InputError, brief
from ssl_kd.vision.teachers.base import Teacher
from ssl_kd.vision.teachers.hugging_face import loading_from_transformers, unavailable
from ssl_kd.vision.teachers.network import Network, Transform
from ssl_kd.vision.teachers.request import Request
from ssl_kd.vision.teachers.tokens import last_layers, one_layer


def load_hf(request: Request) -> Teacher:
    """Load `hf:NAME`, a repository on the Hub or a folder, with its image processor.

    TOKEN `class` is the image embedding of a model of images and texts (CLIP, SigLIP), the class
    token of a vision transformer, and what other networks pool.
    """
    from transformers import AutoImageProcessor, AutoModel

    request.refuse_weights("has its own; a local model is hf:FOLDER")
    try:
        with loading_from_transformers():
            processor = AutoImageProcessor.from_pretrained(request.model)
            model: Any = AutoModel.from_pretrained(request.model)
    except OSError as error:
        raise unavailable(request.name, error) from error
    except (ValueError, KeyError, ImportError) as error:  # an unknown architecture, other code
        raise InputError(f"{request.name} cannot be loaded: {brief(error, 400)}") from error
    settings = processor.to_dict()
    transform = processor_transform(settings, request.image_size, request.name)
    resized = transform.size != processor_transform(settings, None, request.name).size
    features = _features(model.eval(), request, resized)
    try:
        return Network(request.name, model, features, transform, request.token)
    except TypeError as error:  # its forward has other arguments
        raise InputError(
            f"{request.name} does not embed plain images ({brief(error)}): choose an image model"
        ) from error


def _features(model: Any, request: Request, resized: bool) -> Callable[[Tensor], Tensor]:
    """Return the function that computes embeddings; `resized` says that the input is not native."""
    vision: nn.Module = getattr(model, "vision_model", model)
    joint = getattr(model, "get_image_features", None)
    options: dict[str, Any] = {}
    parameters = inspect.signature(joint or model.forward).parameters
    if resized and "interpolate_pos_encoding" in parameters:
        options["interpolate_pos_encoding"] = True
    has_class_token = any(
        name.rpartition(".")[2] in ("cls_token", "class_embedding")
        for name, _ in vision.named_parameters()
    )
    config: Any = vision.config
    patch_size = getattr(config, "patch_size", 1)
    token = request.token
    norm: Any = getattr(vision, "layernorm", None) or getattr(vision, "norm", None)
    if token == "last4":
        if not has_class_token or norm is None:
            raise InputError(
                f"TOKEN is 'last4', but {request.name} has no class token or no final norm of all "
                "tokens: set it to 'class', 'patch' or 'both'"
            )
        options["output_hidden_states"] = True

    def features(x: Tensor) -> Tensor:
        out = (joint or model)(pixel_values=x, **options)
        hidden: Tensor = out.last_hidden_state
        pooled: Tensor | None = out.pooler_output
        # Class token and registers come before the patches; networks of stages have fewer patches.
        prefix = hidden.shape[1] - x.shape[2] // patch_size * (x.shape[3] // patch_size)
        if hidden.ndim != 3 or prefix < 0:
            if token != "class" or pooled is None:
                raise InputError(
                    f"TOKEN is {token!r}, but {request.name} has no such output: set it to "
                    "'class', or choose another teacher"
                )
            return pooled.flatten(1)
        if token == "last4":
            layers = [norm(layer) for layer in out.hidden_states[-4:]]
            return last_layers([(layer[:, prefix:], layer[:, 0]) for layer in layers])
        patches = hidden[:, prefix:]
        if joint is None and has_class_token:
            pooled = hidden[:, 0]  # a pooler after it may be untrained, as that of ViT
        if pooled is None:
            pooled = patches.mean(1)
        return one_layer(token, pooled, patches)

    return features


def processor_transform(
    settings: dict[str, Any], image_size: int | None = None, name: str = "the model"
) -> Transform:
    """Return the preprocessing of an image processor of transformers.

    Args:
        settings: content of `preprocessor_config.json`.
        image_size: side of a square input; None: that of the settings.
        name: name of the teacher, for messages.

    Raises:
        InputError: the processor does more than to resize, crop, scale and normalize.
    """
    geometry = _geometry(settings)
    if geometry is None:
        raise InputError(
            f"the image processor of {name} prepares images in a way that is not supported here "
            f"(size {settings.get('size')}, crop_size {settings.get('crop_size')}): write a "
            "teacher of your own around the model, see ssl_kd.teachers.Network"
        )
    shape = geometry.shape
    resize = geometry.resize
    if image_size is not None:
        ratios = image_size / shape[0], image_size / shape[1]
        if isinstance(resize, int):
            resize = round(resize * min(ratios))
        else:
            resize = round(resize[0] * ratios[0]), round(resize[1] * ratios[1])
        shape = (image_size, image_size)
    scale = 255 * settings["rescale_factor"] if settings.get("do_rescale", True) else 255
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not settings.get("do_normalize", True) or mean is None or std is None:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    filters = Image.Resampling(settings.get("resample", Image.Resampling.BILINEAR))
    return Transform(
        size=shape[0] if shape[0] == shape[1] else shape,
        resize=resize if isinstance(resize, int) or resize[0] != resize[1] else resize[0],
        interpolation=filters.name.lower(),
        # (scale * x - mean) / std with one division.
        mean=tuple(m / scale for m in mean),
        std=tuple(s / scale for s in std),
        crop_mode=geometry.mode,
        rounds_down=geometry.mode == "center" or _crop_of(settings) is not None,
    )


class _Geometry(NamedTuple):
    """How an image gets the shape of the input: `resize` and `mode` are those of `Transform`."""

    shape: tuple[int, int]  # height and width of the input, in pixels
    resize: int | tuple[int, int]
    mode: Literal["center", "squash"]


def _geometry(settings: dict[str, Any]) -> _Geometry | None:
    """Return how an image processor resizes and crops; None if it does it in another way."""
    size = settings.get("size") or {}
    edge = size if isinstance(size, int) else size.get("shortest_edge")
    share = settings.get("crop_pct")  # of ConvNeXt, which crops below 384 pixels only
    if share is not None and edge is not None:
        if edge < 384:
            return _Geometry((edge, edge), int(edge / share), "center")
        return _Geometry((edge, edge), (edge, edge), "squash")
    if settings.get("do_pad") or not settings.get("do_resize", True):
        return None
    crop = _crop_of(settings)
    if edge is not None and crop is not None:
        return _Geometry(crop, edge, "center")
    if isinstance(size, dict) and {"height", "width"} <= size.keys():
        resize = size["height"], size["width"]
        return _Geometry(crop or resize, resize, "squash")
    return None


def _crop_of(settings: dict[str, Any]) -> tuple[int, int] | None:
    """Return height and width of the crop of an image processor; None if it does not crop."""
    crop = settings.get("crop_size") if settings.get("do_center_crop") else None
    if not crop:
        return None
    return (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
