"""Measure how often `firstnan diff` names a planted difference between two trainings.

    python -m benchmarks.differences             # 200 differences, 200 equal pairs
    python -m benchmarks.differences --nets mlp --seeds 3
    python -m benchmarks.differences --cost FOLDER    # of recording a model of transformers

Ten small networks are trained for two steps, once as they are and once with one of twenty changes;
half of these act in the backward pass or in the update. A difference counts as named if what
differs, the pass and, where there is one, the operation are right. Equal pairs are trained twice
with the same seed. Each network is also trained with its body in bfloat16, and compared within the
rounding of the dtypes. All trainings run in this process, one after the other.

The cost is that of a plain loop over a causal language model, 4 x 128 tokens, with and without
recording, in turns of three steps in processes of their own; the first step is left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.turns import header, row
from firstnan.diff import Comparison, Difference, Recording
from firstnan.trace import Trace, lines_file, write_about

STEPS = 2
BATCH = 6
LENGTH = 8  # of a text
WORDS = 20
WIDTH = 16
CLASSES = 5


class Expected(NamedTuple):
    """What a report must say of a planted change."""

    what: set[str]
    direction: str
    op: str = ""  # a pattern in the operation's name


class Net(nn.Module):
    """A network of a kind, with dropout and a norm, and a change in its forward pass."""

    def __init__(self, kind: str, plant: str) -> None:
        super().__init__()
        self.kind, self.plant = kind, plant
        self.body = BODIES[kind]()
        self.drop = nn.Dropout(0.5 if plant == "dropout p" else 0.2)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-3 if plant == "eps" else 1e-5)
        self.out = nn.Linear(WIDTH, CLASSES)
        if plant == "frozen":
            self.out.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[batch, class]`."""
        half = torch.autocast("cpu", torch.bfloat16) if self.plant == "bf16" else nullcontext()
        with half:
            x = self.body(x)
            x = x.mean(1) if x.ndim == 3 else x.flatten(1)
        x = self.norm(x.float())
        if self.plant == "mask":
            x = x.masked_fill(torch.arange(WIDTH) == 3, 0.0)
        x = F.silu(x) if self.plant == "activation" else F.gelu(x)
        if self.plant == "dropout seed":
            torch.rand(1)
        side = self.out(self.drop(x))
        if self.plant == "detach":
            x = x.detach()
        return side + self.out(x)


class Words(nn.Module):
    """Embeddings of token ids, and a network on them."""

    def __init__(self, inner: nn.Module, *, needs_first: bool = False) -> None:
        super().__init__()
        self.table, self.inner, self.needs_first = nn.Embedding(WORDS, WIDTH), inner, needs_first

    def forward(self, ids: Tensor) -> Tensor:
        """Return `[batch, length, width]`."""
        result = self.inner(self.table(ids))
        return result[0] if self.needs_first else result


class Attention(nn.Module):
    """Causal self-attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, length, width]`."""
        q, k, v = (y.unflatten(-1, (2, -1)).mT for y in self.qkv(x).chunk(3, -1))
        q, k, v = (y.transpose(1, 2).mT.contiguous() for y in (q, k, v))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def _convolutions(norm: bool) -> nn.Module:
    layers = [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1)]
    layers += [nn.BatchNorm2d(4)] if norm else []
    return nn.Sequential(*layers, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


BODIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "deep": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), _mlp(), nn.Tanh(), _mlp()),
    "cnn": lambda: _convolutions(norm=False),
    "batchnorm": lambda: _convolutions(norm=True),
    "bag": lambda: nn.EmbeddingBag(WORDS, WIDTH),
    "words": lambda: Words(_mlp()),
    "gru": lambda: Words(nn.GRU(WIDTH, WIDTH, batch_first=True), needs_first=True),
    "lstm": lambda: Words(nn.LSTM(WIDTH, WIDTH, batch_first=True), needs_first=True),
    "encoder": lambda: Words(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)),
    "causal": lambda: Words(Attention()),
}
OF_FEATURES = ("mlp", "deep", "cnn", "batchnorm")

FORWARD = {
    "seed": Expected({"weights"}, "before"),
    "batch": Expected({"batch"}, "before"),
    "scaling": Expected({"batch", "operation"}, "before"),
    "activation": Expected({"operation"}, "forward", "silu"),
    "dropout p": Expected({"arguments"}, "forward", "bernoulli"),
    "eval": Expected({"operation", "arguments"}, "forward", r"eval\(\)"),
    "dropout seed": Expected({"random numbers"}, "forward", "bernoulli"),
    "eps": Expected({"arguments"}, "forward", "layer_norm"),
    "mask": Expected({"operation"}, "forward", "masked_fill"),
    "labels": Expected({"part"}, "forward"),
}
BACKWARD = {
    "sum": Expected({"arguments"}, "forward", "nll_loss"),
    "factor": Expected({"operation"}, "backward", "mul"),
    "detach": Expected({"operation"}, "backward"),
    "hook": Expected({"operation"}, "backward", "mul"),
    "frozen": Expected({"gradient"}, "update"),
    "zero_grad": Expected({"operation"}, "backward", "add"),
    "clip": Expected({"operation"}, "forward", "norm"),
    "lr": Expected({"settings"}, "update", "AdamW"),
    "weight decay": Expected({"settings"}, "update", "AdamW"),
    "optimizer": Expected({"operation"}, "update"),
}
PLANTS = {**FORWARD, **BACKWARD}


def train(kind: str, plant: str, seed: int) -> list[Tensor]:
    """Train a network of a kind, with a change or without one (`""`); return the losses."""
    torch.manual_seed(seed + 1000 if plant == "seed" else seed)
    net = Net(kind, plant)
    if plant == "hook":
        net.out.weight.register_hook(lambda gradient: gradient * 1.5)
    data = torch.Generator().manual_seed(seed + 1000 if plant == "batch" else seed)
    optimizer: torch.optim.Optimizer
    if plant == "optimizer":
        optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-2)
    else:
        lr, decay = 2e-2 if plant == "lr" else 1e-2, 0.2 if plant == "weight decay" else 0.01
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=decay)
    torch.manual_seed(seed)
    net.train(plant != "eval")
    losses = []
    for _ in range(STEPS):
        if kind in OF_FEATURES:
            x = torch.randn(BATCH, WIDTH, generator=data)
            x = x * 2 if plant == "scaling" else x
        else:
            x = torch.randint(1, WORDS, (BATCH, LENGTH), generator=data)
            x = x // 2 if plant == "scaling" else x
        labels = torch.randint(CLASSES, (BATCH + 1,), generator=data)
        logits = net(x)
        wanted = labels[:-1] if plant == "labels" else labels[1:]
        loss = F.cross_entropy(logits, wanted, reduction="sum" if plant == "sum" else "mean")
        if plant == "factor":
            loss = loss * 4
        if plant != "zero_grad":
            optimizer.zero_grad()
        loss.backward()
        if plant != "clip":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False)
        optimizer.step()
        losses.append(loss)
    return losses


def record(folder: Path, kind: str, plant: str, seed: int) -> Recording:
    """Train and record in this process."""
    folder.mkdir(parents=True)
    write_about(folder, f"{kind} {plant}")
    with Trace(lines_file(folder, 0)).recording():
        train(kind, plant, seed)
    return Recording.read(folder, 0)


def is_named(found: Difference | None, expected: Expected) -> bool:
    """Return whether a report says what was planted."""
    if found is None or found.what not in expected.what:
        return False
    ops = [op for op in (found.a, found.b) if op is not None]
    right_pass = any(op.direction == expected.direction for op in ops)
    text = " ".join([*(op.op for op in ops), *(line for _, line in found.lines), found.cause])
    return right_pass and re.search(expected.op, text) is not None


PLAIN = """
import resource, sys, time
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(3):
    ids = torch.randint(model.config.vocab_size, (4, 128))
    began = time.process_time()
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("step", step, time.process_time() - began, memory, flush=True)
"""


def cost(model: Path, rounds: int) -> None:
    """Print the CPU time per step and the peak memory with and without recording."""
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "plain.py"
        script.write_text(PLAIN)
        ratios, more = [], []
        for i in range(rounds):
            # More steps than the script makes, so that it reports all of them.
            record_it = ["-m", "firstnan", "record", "--steps", "9", f"{name}/{i}"]
            (plain, of_plain), (recorded, of_recorded) = (
                _steps([*words, str(script), str(model)]) for words in ([], record_it)
            )
            ratios.append(recorded / plain)
            more.append(of_recorded - of_plain)
            print(
                f"plain {plain:.2f} s, {of_plain:,.0f} MiB; recorded {recorded:.2f} s", flush=True
            )
    print(f"CPU time of a step, relative to plain: {median(ratios):.2f}")
    print(f"more memory: {median(more):,.0f} MiB")


def _steps(command: list[str]) -> tuple[float, float]:
    """Return the median CPU seconds of the steps after the first, and the peak memory in MiB."""
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    rows = [line.split()[2:] for line in result.stdout.splitlines() if line.startswith("step")]
    return median(float(seconds) for seconds, _ in rows[1:]), float(rows[-1][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nets", nargs="*", choices=BODIES, default=list(BODIES))
    parser.add_argument("--plants", nargs="*", choices=PLANTS, default=list(PLANTS))
    parser.add_argument("--seeds", type=int, default=20, help="equal pairs of each network")
    parser.add_argument("--show", action="store_true", help="print the reports that are wrong")
    parser.add_argument("--cost", type=Path, help="folder of a causal language model")
    args = parser.parse_args()
    if args.cost is not None:
        cost(args.cost, rounds=3)
        return
    named: Counter[str] = Counter()
    alarms = of_rounding = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in args.nets:
            plain = record(folder / kind / "plain", kind, "", 0)
            for plant in args.plants:
                changed = record(folder / kind / plant, kind, plant, 0)
                found = Comparison(plain, changed).first()
                right = is_named(found, PLANTS[plant])
                named[plant] += right
                if args.show and not right:
                    print(f"--- {kind}, {plant}\n{found}\n")
            half = Comparison(plain, record(folder / kind / "half", kind, "bf16", 0), None).first()
            of_rounding += half is not None
            if args.show and half is not None:
                print(f"--- {kind}, bfloat16\n{half}\n")
            for seed in range(args.seeds):
                a, b = (record(folder / kind / f"{side}{seed}", kind, "", seed) for side in "ab")
                alarms += Comparison(a, b).first() is not None
    header("change", "named", "of")
    for plant in args.plants:
        row(plant, f"{named[plant]}", f"{len(args.nets)}")
    print(f"\nnamed: {named.total()} of {len(args.nets) * len(args.plants)}")
    print(f"equal pairs with a difference: {alarms} of {args.seeds * len(args.nets)}")
    print(f"float32 and bfloat16 with a difference: {of_rounding} of {len(args.nets)}")


if __name__ == "__main__":
    main()
