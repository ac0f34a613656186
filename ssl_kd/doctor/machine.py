"""Check the installation: packages, device, kernels and folders."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ssl_kd.doctor.finding import FOLLOW_MESSAGE, Finding

# Import names, and for a package of an extra what needs it.
_NEEDED = "torch numpy scipy sklearn faiss safetensors PIL rich matplotlib jinja2 pyarrow".split()
_OF_EXTRAS = {
    "torchvision": ("vision", "networks as teachers of images, and torchvision's data sets"),
    "timm": ("vision", "DINOv2, EfficientNet-Lite0 and timm's models as teachers"),
    "tensorboard": ("tensorboard", "REPORT_TO tensorboard"),
    "huggingface_hub": ("hub", "models from the Hugging Face Hub, and export in its formats"),
    "ssl_kd_explore": ("explore", "ssl_kd explore, curate, compare, export and watch"),
}


def packages() -> Iterator[Finding]:
    """Report the Python version, and check that packages can be imported.

    A required package that is not installed is a fault; for one of an extra it is a note.
    """
    result = f"{platform.python_version()} at {sys.executable}, {platform.platform(terse=True)}"
    yield Finding("python", result)
    for name in (*_NEEDED, *_OF_EXTRAS):
        if name in _OF_EXTRAS and importlib.util.find_spec(name) is None:
            extra, users = _OF_EXTRAS[name]
            change = f"for {users}: pip install 'ssl_kd[{extra}]'"
            yield Finding(name, "not installed", change, note=True)
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a broken binary may raise anything
            change = f"its binary does not work here: pip install --force-reinstall {name}"
            if name == "torchvision":
                change = (
                    "if it was built for another torch, install both from one index: pip install "
                    "--force-reinstall torch torchvision"
                )
            elif isinstance(error, ModuleNotFoundError) and error.name == name:
                change = (
                    "run `make train`, which installs everything in .venv, or pip install ssl_kd"
                )
            yield Finding(name, f"{type(error).__name__}: {error}", change)
        else:
            yield Finding(name, str(getattr(module, "__version__", "installed")))


def device(name: str, use_fp16: bool) -> Iterator[Finding]:
    """Report the precision for a device, and test one kernel in each dtype that it uses."""
    import torch

    from ssl_kd.core.precision import Precision

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    build = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch for the CPU"
    yield Finding("devices", f"{', '.join(gpus) or 'no CUDA device'}; {build}")
    yield Finding("cores", f"{torch.get_num_threads()} threads for torch, {os.cpu_count()} cores")
    try:
        precision = Precision.for_device(name, use_fp16=use_fp16)
    except (ValueError, RuntimeError) as error:
        change = f"set DEVICE in config.py to 'cpu', or {FOLLOW_MESSAGE}"
        yield Finding("precision", str(error), change)
        return
    yield Finding("precision", str(precision), note=use_fp16 and precision.student == torch.float32)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    for dtype in dict.fromkeys((precision.teacher, precision.student, torch.float32)):
        x, y = (t.to(dtype).to(precision.device) for t in (a, b))  # Apple's GPUs have no float64
        x.requires_grad_()
        loss = torch.log_softmax((x @ y).float(), dim=-1)
        loss.diagonal().mean().backward()
        expected = torch.log_softmax(a @ b, dim=-1)
        error = ((loss.detach().cpu() - expected).abs().max() / expected.abs().max()).item()
        assert x.grad is not None
        correct = error < 20 * torch.finfo(dtype).eps and bool(torch.isfinite(x.grad).all())
        change = "this device computes wrong results: set DEVICE in config.py to 'cpu'"
        yield Finding(
            f"kernel {str(dtype).removeprefix('torch.')}",
            f"product, softmax and backward differ from float64 by {error:.1e}",
            "" if correct else change,
        )


def folders(folder_of: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the folders of these settings are writable."""
    for name, path in folder_of.items():
        folder = Path(path).absolute()
        # A folder that does not exist yet will be made in its nearest existing parent.
        parent = next(parent for parent in (folder, *folder.parents) if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=parent) as file:
                file.write(b"x")
        except OSError as error:
            change = f"make it writable, or set {name} in config.py to another folder"
            yield Finding(name.lower(), f"{folder}: {error.strerror or error}", change)
        else:
            free = shutil.disk_usage(parent).free / 2**30
            yield Finding(name.lower(), f"{folder}: writable, {free:.1f} GiB free")
