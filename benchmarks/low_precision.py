"""Train a small transformer in emulated float8 and MXFP8, with the worst modules and without.

    python -m benchmarks.low_precision            # or with one format, as in "... mxfp8"
    python -m benchmarks.low_precision --devices  # what is chosen for each device

The text is docs/*.md; `precision_report` of the model trained in fp32 names the worst modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.turns import header, row
from firstnan.low_precision import LowPrecision, precision_report
from ssl_kd.precision import DeviceInfo, Precision

DIM, LENGTH, BATCH, STEPS, TOLERANCE = 32, 32, 16, 80, 2e-3
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


def train(text: Tensor, format: str, keep: list[str]) -> tuple[Transformer, LowPrecision, float]:
    """Train a model; return it, its counts, and its loss on the last tenth of the text."""
    torch.manual_seed(0)
    model, end = Transformer(int(text.max()) + 1), len(text) * 9 // 10
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    low = LowPrecision(model, format, keep)
    for _ in range(STEPS):
        with low:
            optimizer.zero_grad()
            losses(model, text, torch.randint(end - LENGTH, (BATCH,))).mean().backward()
        optimizer.step()
    starts = torch.arange(end, len(text) - LENGTH - 1, LENGTH)[:64]
    with LowPrecision(model, format, keep):  # with gradients: without, attention is one operation
        return model, low, losses(model, text, starts).mean().item()


def print_devices() -> None:
    header("device", "teacher", "students", "loss scale", "float8 in hardware", "why")
    devices = [DeviceInfo("cuda", name, capability) for name, capability in GPUS.items()]
    for device in (*devices, DeviceInfo("cpu", "CPU with bf16", None, True), DeviceInfo("cpu")):
        chosen = Precision.for_device(device, use_fp16=True)
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (chosen.teacher, chosen.student))
        float8 = "e4m3, e5m2" if device.capability and device.capability >= (8, 9) else "none"
        row(str(device), *dtypes, "yes" if chosen.scale else "no", float8, device.halves()[1])


def main() -> None:
    if "--devices" in sys.argv:
        return print_devices()
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = b"".join(page.read_bytes() for page in pages)
    text = torch.tensor(list(text)).unique(return_inverse=True)[1]
    model, _, exact = train(text, "fp32", [])
    starts, events = torch.arange(BATCH) * LENGTH, ("saturated", "flushed")
    header("format", "kept in fp32", "held-out loss", "beyond fp32", *events)
    row("fp32", "all", f"{exact:.3f}", "", "", "")
    for format in sys.argv[1:] or ("e4m3", "e5m2", "mxfp8", "mxfp8_up"):
        report = precision_report(model, lambda: losses(model, text, starts), format, TOLERANCE)
        for keep in [[], report.keep_high]:
            _, low, loss = train(text, format, keep)
            counts = [[n for k, n in low.shares.items() if k[1].endswith(e)] for e in events]
            shares = [f"{a / b:.2%}" for a, b in (torch.stack(pairs).sum(0) for pairs in counts)]
            row(format, ", ".join(keep) or "none", f"{loss:.3f}", f"{loss - exact:+.3f}", *shares)


if __name__ == "__main__":
    main()
