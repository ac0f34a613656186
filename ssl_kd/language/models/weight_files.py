"""List the weight files in the folder of a language model."""

from __future__ import annotations

import json
from pathlib import Path

from ssl_kd.core.files import CorruptFileError


def model_files(folder: Path) -> list[Path]:
    """List the weight files that transformers would load from a language model's folder.

    The list holds `model*.safetensors`, or else `pytorch_model*.bin`. If the configuration or an
    index of shards names files with other names, the index and those files are appended.
    """
    usual = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    names = _file_names(folder / "config.json", "transformers_weights")
    kinds = ("model.safetensors", "pytorch_model.bin")
    names = names or [name for kind in kinds for name in (kind, f"{kind}.index.json")]
    loaded = next((folder / name for name in names if (folder / name).is_file()), None)
    if loaded is None:
        return usual
    shards = {loaded}
    if loaded.name.endswith(".index.json"):
        shards = {folder / name for name in _file_names(loaded, "weight_map")}
    others = sorted(shards - {*usual})
    return [*usual, *([loaded] if others and loaded not in others else []), *others]


def _file_names(path: Path, key: str) -> list[str]:
    """Return the file names that a JSON file has under `key`: one string, or a mapping's values."""
    try:
        value = json.loads(path.read_bytes()).get(key) if path.is_file() else None
        names = [] if value is None else [value] if isinstance(value, str) else list(value.values())
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} does not name files")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptFileError(
            f"{path} is damaged ({error}): replace it by an intact copy"
        ) from error
    return names
