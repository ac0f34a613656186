"""Draw what a terminal shows of a fault and of two runs that differ, for `firstnan/README.md`.

python -m benchmarks.terminal  # writes docs/figures/terminal.svg

The fault is that of sgl-project/sglang!31017: all sigmoids of a token's router logits are 0, and so
is their sum. The two runs are a distillation without and with the factor T² of its loss.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from benchmarks.turns import PAGE

FILE = PAGE.parent / "figures" / "terminal.svg"
SCRIPTS = {
    "moe.py": """\
import torch
from torch import nn


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 6), nn.Linear(4, 6)
        nn.init.ones_(self.router.weight)

    def forward(self, tokens):
        top, chosen = self.router(tokens).sigmoid().topk(2)
        top = top / top.sum(-1, keepdim=True)
        return (self.experts(tokens).gather(-1, chosen) * top).sum(-1)


torch.manual_seed(0)
model = Mixture()
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.randn(5, 8, 4)
batches[2, 5] = -30  # a token that no expert wants
for tokens in batches:
    optimizer.zero_grad()
    model(tokens).square().mean().backward()
    optimizer.step()
""",
    "distill.py": """\
import sys

import torch
from torch import nn
from torch.nn import functional as F

T = 2.0
torch.manual_seed(0)
teacher, student = nn.Linear(8, 50), nn.Linear(8, 50)
optimizer = torch.optim.AdamW(student.parameters())
for tokens in torch.randn(3, 32, 8):
    target = (teacher(tokens) / T).softmax(-1).detach()
    loss = F.kl_div((student(tokens) / T).log_softmax(-1), target, reduction="batchmean")
    if "--new" in sys.argv:
        loss = loss * T**2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
}
COMMANDS = (
    "firstnan moe.py",
    "firstnan record A distill.py",
    "firstnan record B distill.py --new",
    "firstnan diff A B",
)
PROMPT = "$ python -m "
COLUMN = 7.2  # pixels, of a character
ROW = 17
MARGIN = 18
BACKGROUND = "#1e2127"
PLAIN = "#c8ccd4"
COMMAND = "#ffffff"
COLORS = {"first bad": "#ff7b86", "only in B": "#ff7b86", "cause": "#f2c56b", "remedy": "#8fd18b"}


def transcript() -> list[str]:
    """Run the commands in an empty folder; return the lines of a terminal that ran them.

    Raises:
        RuntimeError: A command ended with another exit code than expected.
    """
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in SCRIPTS.items():
            Path(folder, name).write_text(source, encoding="utf-8")
        for command, expected in zip(COMMANDS, (3, 0, 0, 1), strict=True):
            done = subprocess.run(
                [sys.executable, "-m", *command.split()],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
            )
            if done.returncode != expected:
                raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}")
            lines += [f"{PROMPT}{command}", *done.stdout.splitlines(), ""]
    return lines[:-1]


def draw(lines: list[str]) -> str:
    """Return an SVG picture of a terminal with these lines."""
    width = 2 * MARGIN + COLUMN * max(map(len, lines))
    height = 2 * MARGIN + ROW * len(lines)
    texts = []
    for i, line in enumerate(lines):
        if not line:
            continue
        shown = escape(line, quote=False).replace(" ", "\u00a0")  # XML joins plain spaces
        color = COMMAND if line.startswith(PROMPT) else PLAIN
        color = next((COLORS[start] for start in COLORS if line.startswith(start)), color)
        texts.append(
            f'<text x="{MARGIN}" y="{MARGIN + ROW * (i + 0.75):g}" fill="{color}"'
            f' textLength="{COLUMN * len(line):.1f}">{shown}</text>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}"'
            ' font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="12">',
            f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
            *texts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(draw(transcript()), encoding="utf-8")
    print(FILE)
