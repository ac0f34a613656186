"""Write tensors and texts into one safetensors file with a hash of both, and read them back.

Other tools can inspect the file, and reading it executes no code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from firstnan.errors import BAD_INPUT, UserError

_TYPES = "complex128 complex64 float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
DTYPES = {x: getattr(torch, x) for x in [*_TYPES.split(), "float8_e4m3fn", "float8_e5m2"]}
"""Data types of the tensors that a file can hold, by name."""


class BundleError(UserError):
    """A bundle cannot be made or read, or does not fit the model."""

    exit_code = BAD_INPUT


def library() -> ModuleType:
    """Return safetensors, which nothing but bundles needs."""
    try:
        import numpy  # noqa: F401  # for safetensors.torch, which does not require it
        import safetensors.torch
    except ImportError as error:
        raise BundleError(f"a bundle needs: pip install safetensors numpy ({error})") from error
    return safetensors


def pack(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a file with these texts and copies of these tensors.

    Raises:
        BundleError: a tensor is sparse or has a data type that is not in `DTYPES`.
    """
    stored = {}
    for name, x in tensors.items():
        if x.layout != torch.strided or x.dtype not in DTYPES.values():
            raise BundleError(f"a bundle cannot hold {name}, which is {x.dtype}, {x.layout}")
        # Copied, because safetensors refuses tensors that share memory.
        x = x.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        stored[name] = torch.view_as_real(x) if x.is_complex() else x
    names = "\n".join(name for name, x in tensors.items() if x.is_complex())
    about = {**texts, "complex": names}
    return library().torch.save(stored, about | {"sha256": _digest(about, stored)})


def unpack(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a file that `pack` made, and check its hash; nothing in it is executed.

    Returns:
        The texts and the tensors, by name.

    Raises:
        BundleError: there is no such file, it is damaged, or something else has written it.
    """
    if not path.is_file():
        folder, what = (path, "a folder") if path.is_dir() else (path.parent, "not a file")
        names = ", ".join(sorted(x.name for x in folder.glob("*.safetensors"))) or "none"
        raise BundleError(f"{path} is {what}, expected a bundle; bundles in {folder}: {names}")
    safe_open = library().safe_open
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
        if about.pop("sha256") != _digest(about, stored):
            raise ValueError("its bytes are not those that its hash was made of")
        names = about.pop("complex", "").splitlines()
        return about, {name: _restored(x, name in names) for name, x in stored.items()}
    except Exception as error:  # whatever a hostile file raises
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> BundleError:
    """Return the error to raise for a file whose content `error` refused."""
    return BundleError(f"{path} is damaged, or is no bundle: {error!r}")


def _restored(x: Tensor, is_complex: bool) -> Tensor:
    if x.dtype == torch.bool:  # a byte other than 0 and 1 would be undefined behavior
        return x.view(torch.uint8) != 0
    # A copy, because its address in the file may not be aligned to a complex number.
    return torch.view_as_complex(x.clone()) if is_complex else x


def _digest(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the hash of texts, and of the names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256(repr(sorted(about.items())).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()
