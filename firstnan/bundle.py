"""Save what a bad forward pass needs to be run again elsewhere, and run it again there.

A bundle is one safetensors file: a JSON header, then the bytes of the tensors. Other tools can
inspect it, and reading it executes no code. It holds rows of the training data.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path

from firstnan.errors import BAD_INPUT, FAILED, OK, UserError
from firstnan.watch import Call, Finding, Watch, inner_of

_KINDS = "F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL F8_E4M3 F8_E5M2".split()
_TYPES = "double float half bfloat16 long int short int8 uint8 bool float8_e4m3fn float8_e5m2"
_DTYPES = {kind: getattr(torch, name) for kind, name in zip(_KINDS, _TYPES.split(), strict=True)}
_KEYS = {"contains": str, "report": str, "path": str, "torch": str, "step": int | None}
_KEYS |= {"finding": tuple[str | None, str | None, bool | None, list[int]]}
_KEYS |= {"training": list[str], "weights": dict[str, Tensor]}
_UNSIGNED = "0" * 64  # in place of the hash while the file is hashed


class BundleError(UserError):
    """A bundle cannot be made or read, or does not fit the model."""

    exit_code = BAD_INPUT


def save(path: Path, watch: Watch, finding: Finding) -> str:
    """Save the pass of a finding: of the module that it names if that repeats it, or of the model.

    Returns:
        A sentence: where the file is and what it contains, or why there is none.
    """
    try:
        for name in dict.fromkeys([(finding.module or "").partition(".")[2], ""]):
            for call in watch.passes_of(name):
                module = inner_of(watch.model).get_submodule(name)
                found = _explained(module, call)
                if found is None or _key(found)[1:3] != _key(finding)[1:3]:
                    continue
                content = _encoded(
                    module, call, name, replace(found, module=finding.module, step=finding.step)
                )
                path = _written(path, content)
                return f"{path}, with rows of your data; python -m firstnan replay {path} shows it"
    except Exception as error:  # whatever the model's arguments raise must not end the training
        return f"not saved: {error if isinstance(error, BundleError | OSError) else repr(error)}"
    return "not saved: the model, run again, does not show it"


def read(path: Path) -> dict[str, Any]:
    """Read a bundle; nothing in it is executed.

    Returns:
        A dictionary: `contains` and `report`, text; `path`, of the module in its model; `finding`
        (module, operation, whether backward, rows) and `step`; `training`, names of modules in that
        mode; `weights`, by name; `call`, the pass; and `torch`, its version.

    Raises:
        BundleError: the file is damaged, or is no bundle.
    """
    try:
        return _decoded(path.read_bytes())
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        what = error if isinstance(error, ValueError) else repr(error)
        raise BundleError(f"{path} is damaged, or is no bundle: {what}") from error


def replay(bundle: Mapping[str, Any], model: nn.Module) -> Finding | None:
    """Run the pass again on the CPU, and return the first operation that is not finite.

    The random numbers of a GPU are not repeated. A GPU's autocast becomes that of the CPU.

    Args:
        bundle: from `read`.
        model: the model of the script, or the module of the bundle alone; it is moved to the CPU,
            its weights are replaced, and its modules get the modes (training or not) of the pass.

    Raises:
        BundleError: the model has other weights or buffers than the bundle.
    """
    module = dict(model.cpu().named_modules()).get(bundle["path"], model)
    call = bundle["call"]
    weights = dict(module.named_parameters())
    tensors = weights | dict(module.named_buffers()), bundle["weights"] | call.buffers
    for name in {**tensors[0], **tensors[1]}:
        facts = [
            f"{[*x[name].shape]} of {'floats' if x[name].is_floating_point() else x[name].dtype}"
            if name in x
            else "missing"
            for x in tensors
        ]
        if facts[0] != facts[1]:
            raise BundleError(f"{name!r} is {facts[0]} in the model, expected {facts[1]}")
    for name, p in weights.items():
        p.data = bundle["weights"][name].detach()
        p.requires_grad_(bundle["weights"][name].requires_grad)
    for name, inner in module.named_modules():
        inner.training = name in bundle["training"]
    finding = _explained(module, call)
    return finding and replace(finding, module=bundle["finding"][0], step=bundle["step"])


def main(arguments: Sequence[str]) -> int:
    """Print what a bundle contains, replay it if a model is given, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m firstnan replay")
    parser.add_argument("bundle", type=Path, help="a file from `python -m firstnan --bundle FILE`")
    parser.add_argument("--model", help="MODULE:CALLABLE that returns the model, such as net:Net")
    options = parser.parse_args(arguments)
    try:
        bundle = read(options.bundle)
        text = f"contains   {bundle['contains']}\n{bundle['report']}"
        print("".join(x if x.isprintable() or x == "\n" else "?" for x in text))
        if options.model is None:
            return OK
        module, _, name = options.model.partition(":")
        if not name:
            raise BundleError(f"--model is {module!r}, expected MODULE:CALLABLE, such as net:Net")
        finding = replay(bundle, getattr(importlib.import_module(module), name)())
    except (BundleError, OSError, ImportError, AttributeError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    same = finding is not None and _key(finding) == bundle["finding"]
    print(f"\nreplayed: {'the same' if same else 'not the same'}\n{finding or 'all is finite'}")
    return OK if same else FAILED


def _explained(module: nn.Module, call: Call) -> Finding | None:
    watch = Watch(module, hooks=False)
    watch.calls.append(call)
    return watch.explain()


def _key(finding: Finding) -> list[Any]:
    """Return what must be the same after a replay: module, operation, direction and rows."""
    fault = finding.fault
    op, backward = (None, None) if fault is None else (fault.op, fault.backward)
    return [finding.module, op, backward, list(finding.rows)]


def _written(path: Path, content: bytes) -> Path:
    """Write a new file, with a counter in its name if that is taken, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2))
    path = next(name for name in itertools.chain([path], names) if not os.path.lexists(name))
    with path.open("xb") as file:  # follows no symbolic link
        try:
            file.write(content)
            file.flush()
        except BaseException:
            path.unlink()
            raise
    return path


def _encoded(module: nn.Module, call: Call, path: str, finding: Finding) -> bytes:
    """Return the file with a pass of a module."""
    if call.forward is not None:
        raise BundleError("the script has replaced the model's method `forward`")
    leaves = tree_flatten_with_path((call.args, dict(call.kwargs)))[0]
    keys = itertools.chain(*(place for place, _ in leaves))
    if bad := [x.key for x in keys if isinstance(x, MappingKey) and not isinstance(x.key, str)]:
        raise BundleError(f"a bundle cannot hold a dict with the key {bad[0]!r}, expected strings")
    weights = dict(module.named_parameters())
    buffers = {name: call.buffers.get(name, b) for name, b in module.named_buffers()}
    names = {id(x): name for name, x in [*weights.items(), *buffers.items()]}
    kinds = {dtype: kind for kind, dtype in _DTYPES.items()}
    tensors: dict[str, Tensor] = {}

    def entry(value: Any) -> object:
        if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in kinds:
            name = names.get(id(value), f"input or state {len(tensors)}")
            tensors[name] = value.detach().cpu().contiguous()
            return {"tensor": name, "grad": value.requires_grad}
        if isinstance(value, torch.dtype) and value in kinds:
            return {"dtype": kinds[value]}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return dict(value)
        what = value if isinstance(value, torch.dtype) else type(value).__name__
        raise BundleError(f"a bundle cannot hold an argument of the type {what}")

    about = {
        "contains": f"rows of the training data as they enter {finding.module or 'the model'}, the "
        "gradients at its outputs, its weights, the random state, and names of source files",
        "path": path,
        "finding": _key(finding),
        "step": finding.step,
        "report": str(finding),
        "torch": torch.__version__,
        "weights": weights,
        "training": [name for name, inner in module.named_modules() if inner.training],
        "call": {
            "args": call.args,
            "kwargs": call.kwargs,
            "training": call.training,
            "buffers": buffers,
            "random": {"cpu": call.random["cpu"]},
            "autocast": {"cpu": max(call.autocast.values(), key=lambda kind: kind[1])},
            "gradients": call.gradients,
        },
    }
    text = json.dumps(about, default=entry)
    header: dict[str, Any] = {"__metadata__": {"sha256": _UNSIGNED, "firstnan": text}}
    end, aligned = 0, sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, x in aligned:
        offsets, end = [end, end + x.nbytes], end + x.nbytes
        header[name] = {"dtype": kinds[x.dtype], "shape": [*x.shape], "data_offsets": offsets}
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)
    arrays = [(ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr()) for _, x in aligned]
    body = b"".join(arrays)
    content = len(start).to_bytes(8, "little") + start + body
    digest = hashlib.sha256(content).hexdigest()
    return content.replace(_UNSIGNED.encode(), digest.encode(), 1)


def _decoded(content: bytes) -> dict[str, Any]:
    """Check every length, offset and type of a file, then its hash, and return what it holds."""
    size = int.from_bytes(content[:8], "little")
    if not 0 < size <= len(content) - 8:
        raise ValueError(f"its header has {size} bytes, but the file has {len(content)}")
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__")
    body, end, tensors = content[8 + size :], 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, (begin, stop) = entry["shape"], entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"a tensor has the type {entry['dtype']!r}, expected {[*_DTYPES]}")
        dtype = _DTYPES[entry["dtype"]]
        if any(type(n) is not int or not 0 <= n < 2**48 for n in [begin, stop - begin, *shape]):
            raise ValueError(f"a tensor has the shape {shape}")
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize or stop > len(body):
            raise ValueError(f"a {dtype} of the shape {shape} has the bytes {begin} to {stop}")
        raw = torch.frombuffer(bytearray(body[begin:stop]) or bytearray(8), dtype=torch.uint8)
        raw = raw[: stop - begin]
        tensors[name] = (raw != 0 if dtype == torch.bool else raw.view(dtype)).reshape(shape)
        end = stop
    digest = metadata["sha256"]
    content = content.replace(digest.encode(), _UNSIGNED.encode(), 1)
    if end != len(body) or hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("its bytes are not those that its hash was made of")

    def value(entry: dict[str, Any]) -> object:
        if entry.keys() == {"tensor", "grad"}:
            return tensors[entry["tensor"]].requires_grad_(entry["grad"])
        return _DTYPES[entry["dtype"]] if entry.keys() == {"dtype"} else entry

    about = json.loads(metadata["firstnan"], object_hook=value)
    call = about["call"]
    call["gradients"] = {int(number): x for number, x in call["gradients"].items()}
    kinds = get_type_hints(Call) | {"args": list}
    del kinds["forward"]
    for values, types in ((about, _KEYS), (call, kinds)):
        for key, kind in types.items():
            if not _fits(values[key], kind):
                raise ValueError(f"its {key!r} is {values[key]!r:.80}, expected {kind}")
    call["args"] = tuple(call["args"])
    return {key: about[key] for key in _KEYS} | {"call": Call(**{key: call[key] for key in kinds})}


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value and all within it have a type; a tuple is written as a list."""
    origin, inner = get_origin(kind), get_args(kind)
    if not inner:
        return kind is Any or isinstance(value, kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if not isinstance(value, list if origin is tuple else origin):
        return False
    items = [x for pair in value.items() for x in pair] if isinstance(value, dict) else value
    kinds = inner if origin is tuple else inner * len(value)
    return len(items) == len(kinds) and all(map(_fits, items, kinds))
