"""Save what a bad forward pass needs to be run again elsewhere, and run it again there.

A bundle is one file (`firstnan.bundle_file`). It holds rows of the training data. Bundles of other
kinds, which other packages write, are shown here; their report names the command that runs
them again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firstnan.bundle_file import DTYPES, BundleError, damaged, pack, unpack
from firstnan.errors import BAD_INPUT, FAILED, OK
from firstnan.watch import Call, Finding, Watch, inner_of

KIND = "a forward pass"
_TEXTS = ("contains", "report", "finding", "module", "path")
_KINDS = {"step": int, "training": list, "args": list, "kwargs": dict}
_KINDS |= {"autocast": torch.dtype | None}


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
    texts, tensors = unpack(path)
    if texts.get("kind") != KIND:
        raise BundleError(f"{path} holds {texts.get('kind', 'no pass')!r:.80}, expected {KIND!r}")
    try:
        return _decoded(texts, tensors)
    except Exception as error:  # whatever a hostile file raises
        raise damaged(path, error) from error


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
        texts, _ = unpack(options.bundle)
        text = f"contains   {texts.get('contains')}\n{texts.get('report')}"
        print("".join(x if x.isprintable() or x == "\n" else "?" for x in text))
        if options.model is None:
            return OK
        bundle = read(options.bundle)
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
    return {name: f"{list(x.shape)} of {kinds[name]}" for name, x in tensors.items()}


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
        if isinstance(value, torch.dtype) and value in DTYPES.values():
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
        "kind": KIND,
        "contains": f"rows of the training data as they enter {finding.module or 'the model'}, the "
        "gradients at its outputs, its weights, the random state, and names of source files",
        "report": str(finding),
        "finding": _key(finding),
        "module": finding.module or "",
        "path": path,
        "call": json.dumps(entries),
    }
    return pack(about, tensors)


def _decoded(about: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Check the type of each entry of a file, and return what the file holds."""

    def value(entry: dict[str, Any]) -> object:
        if "torch.Tensor" in entry:
            return tensors[entry["torch.Tensor"]].requires_grad_(entry["grad"])
        return DTYPES[entry["torch.dtype"]] if "torch.dtype" in entry else entry

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
