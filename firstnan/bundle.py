"""Save what a bad forward pass needs to be run again elsewhere, and run it again there.

A bundle is one safetensors file, which other tools can inspect; reading it executes no code. It
holds rows of the training data.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from firstnan.errors import BAD_INPUT, FAILED, OK, UserError
from firstnan.watch import Call, Finding, Watch, inner_of

_TYPES = "complex128 complex64 float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
_DTYPES = {x: getattr(torch, x) for x in [*_TYPES.split(), "float8_e4m3fn", "float8_e5m2"]}
_TEXTS = ("contains", "report", "finding", "module", "path")
_KINDS = {"step": int, "training": list, "args": list, "kwargs": dict}
_KINDS |= {"autocast": torch.dtype | None}


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
                if found is None or _operation(found) != _operation(finding):
                    continue
                found = replace(found, module=finding.module, step=finding.step)
                path = _written(path, _encoded(module, call, name, found))
                return f"{path}, with rows of your data; python -m firstnan replay {path} shows it"
    except Exception as error:  # whatever the model's arguments raise must not end the training
        return f"not saved: {error if isinstance(error, BundleError | OSError) else repr(error)}"
    return "not saved: the model, run again, does not show it"


def read(path: Path) -> dict[str, Any]:
    """Read a bundle; nothing in it is executed.

    Returns:
        A dictionary: `contains` and `report`, text; `module` and `step`, of the report; `finding`,
        operation and rows; `path`, of the module in its model; `training`, names of modules in that
        mode; `weights`, by name; and `call`, the pass.

    Raises:
        BundleError: there is no such file, it is damaged, or it is no bundle.
    """
    if not path.is_file():
        folder, what = (path, "a folder") if path.is_dir() else (path.parent, "not a file")
        names = ", ".join(sorted(x.name for x in folder.glob("*.safetensors"))) or "none"
        raise BundleError(f"{path} is {what}, expected a bundle; bundles in {folder}: {names}")
    safe_open = library().safe_open
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _decoded(file.metadata() or {}, tensors)
    except Exception as error:  # whatever a hostile file raises
        raise BundleError(f"{path} is damaged, or is no bundle: {error!r}") from error


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
    weights = dict(module.named_parameters())
    mine = _facts(weights | dict(module.named_buffers()))
    saved = _facts(bundle["weights"] | bundle["call"].buffers)
    for name in mine | saved:
        if (is_ := mine.get(name, "missing")) != (expected := saved.get(name, "missing")):
            raise BundleError(f"{name!r} is {is_} in the model, expected {expected}")
    for name, p in weights.items():
        p.data = bundle["weights"][name].detach()
        p.requires_grad_(bundle["weights"][name].requires_grad)
    for name, inner in module.named_modules():
        inner.training = name in bundle["training"]
    finding = _explained(module, bundle["call"])
    return finding and replace(finding, module=bundle["module"] or None, step=bundle["step"])


def main(arguments: Sequence[str]) -> int:
    """Print what a bundle contains, replay it if a model is given, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m firstnan replay")
    parser.add_argument("bundle", type=Path, help="a file that --bundle has written")
    parser.add_argument("--model", help="MODULE:CALLABLE that returns the model, such as net:Net")
    options = parser.parse_args(arguments)
    try:
        bundle = read(options.bundle)
        text = f"contains   {bundle['contains']}\n{bundle['report']}"
        print("".join(x if x.isprintable() or x == "\n" else "?" for x in text))
        if options.model is None:
            return OK
        finding = replay(bundle, _model_of(options.model))
    except (BundleError, OSError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    same = finding is not None and _key(finding) == bundle["finding"]
    print(f"\nreplayed: {'the same' if same else 'not the same'}\n{finding or 'all is finite'}")
    return OK if same else FAILED


def _model_of(name: str) -> nn.Module:
    """Return the model that the callable of `--model` returns."""
    try:
        if not isinstance(model := pkgutil.resolve_name(name)(), nn.Module):
            raise TypeError(f"it returned {model!r:.80}")
    except (Exception, SystemExit) as error:  # whatever the user's module and callable raise
        expected = "MODULE:CALLABLE that returns the model without arguments, such as net:Net"
        raise BundleError(f"--model is {name!r}, expected {expected}: {error!r}") from error
    return model


def _explained(module: nn.Module, call: Call) -> Finding | None:
    watch = Watch(module, hooks=False)
    watch.calls.append(call)
    return watch.explain()


def _operation(finding: Finding) -> str:
    fault = finding.fault
    return "none" if fault is None else f"{fault.op}, {'backward' if fault.backward else 'forward'}"


def _key(finding: Finding) -> str:
    """Return what must be the same after a replay."""
    return f"{_operation(finding)}, rows {list(finding.rows)}"


def _facts(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what must be the same of the model's tensors and of those in the bundle."""
    kinds = {name: "floats" if x.is_floating_point() else x.dtype for name, x in tensors.items()}
    return {name: f"{[*x.shape]} of {kinds[name]}" for name, x in tensors.items()}


def _written(first: Path, content: bytes) -> Path:
    """Write a new file, with a counter in its name if that is taken, and return its path."""
    first.parent.mkdir(parents=True, exist_ok=True)
    path, numbers = first, itertools.count(2)
    while os.path.lexists(path):
        path = first.with_stem(f"{first.stem}-{next(numbers)}")
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
    tensors = {"random": call.random["cpu"]}
    for name, p in module.named_parameters():
        tensors[f"{'weight' if p.requires_grad else 'frozen'} {name}"] = p
    tensors |= {f"buffer {name}": call.buffers.get(name, b) for name, b in module.named_buffers()}
    tensors |= {f"gradient {number}": x for number, x in call.gradients.items()}

    def plain(value: Any) -> Any:
        """Return a value for JSON; its tensors get names in `tensors`."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [plain(x) for x in value]
        if isinstance(value, Mapping):
            if bad := [key for key in value if not isinstance(key, str)]:
                what = f"dict with the key {bad[0]!r}, expected strings"
                raise BundleError(f"a bundle cannot hold a {what}")
            return {key: plain(x) for key, x in value.items()}
        if isinstance(value, torch.dtype) and value in _DTYPES.values():
            return {"torch.dtype": str(value).removeprefix("torch.")}
        if isinstance(value, Tensor):
            tensors[name := f"input {len(tensors)}"] = value
            return {"torch.Tensor": name, "grad": value.requires_grad}
        what = value if isinstance(value, torch.dtype) else type(value).__name__
        raise BundleError(f"a bundle cannot hold an argument of the type {what}")

    entries = {
        "step": finding.step,
        "training": [name for name, inner in module.named_modules() if inner.training],
        "args": plain(call.args),
        "kwargs": plain(call.kwargs),
        "autocast": next((plain(kind) for kind, is_on in call.autocast.values() if is_on), None),
    }
    about = {
        "contains": f"rows of the training data as they enter {finding.module or 'the model'}, the "
        "gradients at its outputs, its weights, the random state, and names of source files",
        "report": str(finding),
        "finding": _key(finding),
        "module": finding.module or "",
        "path": path,
        "call": json.dumps(entries),
        "complex": "\n".join(name for name, x in tensors.items() if x.is_complex()),
    }
    for name, x in tensors.items():
        if x.layout != torch.strided or x.dtype not in _DTYPES.values():
            raise BundleError(f"a bundle cannot hold {name}, which is {x.dtype}, {x.layout}")
        # Copied, because safetensors refuses tensors that share memory.
        x = x.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        tensors[name] = torch.view_as_real(x) if x.is_complex() else x
    return library().torch.save(tensors, about | {"sha256": _digest(about, tensors)})


def _decoded(about: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Check the hash of a file and the type of each entry, and return what it holds."""
    if about.pop("sha256") != _digest(about, tensors):
        raise ValueError("its bytes are not those that its hash was made of")
    for name, x in tensors.items():
        if x.dtype == torch.bool:  # a byte other than 0 and 1 would be undefined behavior
            tensors[name] = x.view(torch.uint8) != 0
    for name in about.get("complex", "").splitlines():
        # A copy, because its address in the file may not be aligned to a complex number.
        tensors[name] = torch.view_as_complex(tensors[name].clone())

    def value(entry: dict[str, Any]) -> object:
        if "torch.Tensor" in entry:
            return tensors[entry["torch.Tensor"]].requires_grad_(entry["grad"])
        return _DTYPES[entry["torch.dtype"]] if "torch.dtype" in entry else entry

    def named(kind: str) -> dict[str, Tensor]:
        return {x.removeprefix(kind): tensors[x] for x in tensors if x.startswith(kind)}

    entries = json.loads(about["call"], object_hook=value)
    for key, kind in _KINDS.items():
        if not isinstance(entries[key], kind):
            raise ValueError(f"its {key!r} is {entries[key]!r:.80}, expected {kind}")
    training, autocast = entries["training"], entries["autocast"]
    call = Call(
        args=tuple(entries["args"]),
        kwargs=entries["kwargs"],
        training="" in training,
        buffers=named("buffer "),
        random={"cpu": tensors["random"]},
        autocast={"cpu": (autocast or torch.bfloat16, autocast is not None)},
        gradients={int(number): x for number, x in named("gradient ").items()},
    )
    weights = {name: x.requires_grad_() for name, x in named("weight ").items()} | named("frozen ")
    facts = {"step": entries["step"], "training": training, "weights": weights, "call": call}
    return {key: about[key] for key in _TEXTS} | facts


def _digest(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the hash of texts, and of the names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256(repr(sorted(about.items())).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {[*x.shape]}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()
