"""Choose the layers of which a full copy is trained beside LoRA adapters."""

from __future__ import annotations

from typing import Any

from ssl_kd.core.errors import InputError


def copied_layers(model: Any, wanted: str | None) -> dict[str, Any]:
    """Return the arguments of PEFT's LoraConfig that train copies of the layers in `wanted`.

    Input and output embeddings that share a weight share its copy, too. Raise InputError for a name
    that is not the end of a layer's path, or of a layer whose weights cannot be trained.
    """
    if wanted is None:
        return {}
    names = [name.strip() for name in wanted.split(",")]
    paths = [path for path, _ in model.named_modules()]
    layers = [path for path in paths if _is_layer(model, path)]
    for name in names:
        found = [path for path in paths if path.endswith(name)]  # as PEFT does
        exact = [path for path in layers if f".{path}".endswith(f".{name}")]
        wrong = [path for path in found if path not in exact]
        if wrong or not found:
            known = ", ".join(sorted({path.rpartition(".")[2] for path in layers}))
            raise InputError(
                f"MODULES_TO_SAVE is {wanted!r}, but {name!r} matches"
                f" {wrong[0] if wrong else 'no layer'}; expected names or full paths of layers"
                f" whose weights can be trained: {known}"
            )
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [path for path, layer in model.named_modules() if layer in (first, last)]
    copied = any(path.endswith(name) for path in ends for name in names)
    return {"modules_to_save": names, "ensure_weight_tying": copied and first.weight is last.weight}


def _is_layer(model: Any, path: str) -> bool:
    """Return whether a module is a single layer with weights, none of them quantized."""
    layer = model.get_submodule(path)
    is_float = {weight.is_floating_point() for weight in layer.parameters()}
    return is_float == {True} and not any(layer.children())
