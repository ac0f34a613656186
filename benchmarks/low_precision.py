"""Train a small transformer in emulated float8 and MXFP8, with the worst modules and without.

    python -m benchmarks.low_precision            # or with some formats, as in "... mxfp8 fp16"
    python -m benchmarks.low_precision --shares   # saturated and flushed values of the first seed
    python -m benchmarks.low_precision --devices  # what is chosen for each device

The text is docs/*.md, the same batches for all formats. `precision_report` of one batch, with the
first model trained in fp32, names the modules to keep in fp32. No timings: 160 steps and three
seeds keep all formats within 20 minutes of one free core.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.emulation import LowPrecision, precision_report
from benchmarks.turns import header, row
from ssl_kd.core.precision import DeviceInfo, Precision

DIM, LENGTH, BATCH, STEPS, SEEDS, TOLERANCE = 32, 32, 16, 160, range(3), 1e-2
FORMATS = ("e5m2", "e4m3", "hybrid", "delayed", "mxfp8", "mxfp8_up", "bf16", "fp16")
GPUS = {"P100": (6, 0), "T4": (7, 5), "V100": (7, 0), "A100": (8, 0), "H100": (9, 0)}


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, DIM), nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def losses(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return nn.functional.cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:], reduction="none")


def train(
    text: Tensor, format: str, keep: list[str], seed: int, scale: float = 1.0
) -> tuple[Transformer, dict[tuple[str, str], Tensor], float]:
    """Train a model; return it, its counts, and its loss on the last tenth of the text."""
    torch.manual_seed(seed)
    model, end = Transformer(int(text.max()) + 1), len(text) * 9 // 10
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    low = LowPrecision(model, format, keep)
    for _ in range(STEPS):
        with low:
            optimizer.zero_grad()
            starts = torch.randint(end - LENGTH, (BATCH,))
            (losses(model, text, starts).mean() * scale).backward()
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad /= scale
        optimizer.step()
    counts = {name: pair.clone() for name, pair in low.shares.items()}
    starts = torch.arange(end, len(text) - LENGTH - 1, LENGTH)[:64]
    with low:  # with gradients: without, attention is one operation
        return model, counts, losses(model, text, starts).mean().item()


def print_devices() -> None:
    header("device", "teacher", "students", "loss scale", "float8 in hardware", "why")
    devices = [DeviceInfo("cuda", name, capability) for name, capability in GPUS.items()]
    for device in (*devices, DeviceInfo("cpu", "CPU with bf16", None, True), DeviceInfo("cpu")):
        chosen = Precision.for_device(device, use_fp16=True)
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (chosen.teacher, chosen.student))
        float8 = "e4m3, e5m2" if device.capability and device.capability >= (8, 9) else "none"
        row(str(device), *dtypes, "yes" if chosen.scale else "no", float8, device.halves()[1])


def print_shares(text: Tensor) -> None:
    """Print the shares of saturated and flushed values by kind of tensor, and the worst module."""
    header("format", "tensor", "saturated", "most in", "flushed", "most in")
    for format in FORMATS:
        pairs = train(text, format, [], 0)[1]
        for kind in dict.fromkeys(name.rsplit(" ", 1)[0] for _, name in pairs):
            cells = []
            for event in ("saturated", "flushed"):
                of = {m: pair for (m, name), pair in pairs.items() if name == f"{kind} {event}"}
                part, whole = torch.stack([*of.values()]).sum(0)
                shares = {module: (pair[0] / pair[1]).item() for module, pair in of.items()}
                worst, share = max(shares.items(), key=lambda item: item[1])
                name = worst.removeprefix("blocks.layers.")
                cells += [f"{part / whole:.2%}", f"{name} {share:.2%}" if share > 5e-5 else ""]
            if any(cells[1::2]):
                row(format, kind, *cells)


def main() -> None:
    if "--devices" in sys.argv:
        return print_devices()
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = b"".join(page.read_bytes() for page in pages)
    text = torch.tensor(list(text)).unique(return_inverse=True)[1]
    if "--shares" in sys.argv:
        return print_shares(text)
    exact = [train(text, "fp32", [], seed) for seed in SEEDS]
    print(f"fp32: held-out loss {', '.join(f'{loss:.3f}' for *_, loss in exact)}\n")
    model, starts = exact[0][0], torch.arange(BATCH) * LENGTH
    header("format", "kept in fp32", "error of loss", "of gradient", "held-out loss beyond fp32")
    for format in sys.argv[1:] or FORMATS:
        known = "hybrid" if format == "delayed" else format  # a report has no earlier steps
        report = precision_report(model, lambda: losses(model, text, starts), known, TOLERANCE)
        runs = [("nothing", "everything", [], 1.0)]
        if report.keep_high:
            names = ", ".join(name.removeprefix("blocks.layers.") for name in report.keep_high)
            runs.append((names, "all but what is kept", report.keep_high, 1.0))
        if format == "fp16":
            scaled = f"nothing; loss scale {report.loss_scale:g}"
            runs.append((scaled, "everything", [], report.loss_scale))
        for kept, name, keep, scale in runs:
            trained = [train(text, format, keep, seed, scale) for seed in SEEDS]
            beyond = [low[2] - high[2] for low, high in zip(trained, exact, strict=True)]
            errors = (f"{report.rows[name][of]:.2%}" for of in ("loss", "gradient"))
            spread = f"{statistics.mean(beyond):+.3f} ({min(beyond):+.3f} to {max(beyond):+.3f})"
            row(format, kept, *errors, spread)


if __name__ == "__main__":
    main()
