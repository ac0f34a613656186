"""Ten public threads in which two runs differ, each as a script that has both.

    python -m firstnan record A firstnan/tests/public_differences.py huggingface/trl#2175 --fixed
    python -m firstnan record B firstnan/tests/public_differences.py huggingface/trl#2175
    python -m firstnan diff A B

Each function is a plain training, reduced from its thread, that knows nothing of the guard; with
`--fixed` it is the run that the thread held against the faulty one. `!` marks a pull request.
`benchmarks.public_differences` compares both of each.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 2
BATCH = 4
LENGTH = 6
WORDS = 20
WIDTH = 8


class Thread(NamedTuple):
    """A public thread, and what `firstnan diff` must name: the operation, and words of its cause.

    Both were written down before the comparison was first run. `op` is a pattern in the name of
    the operation at which the runs part.
    """

    name: str
    op: str
    why: str
    run: Callable[[bool], None]
    ranks: int


THREADS: dict[str, Thread] = {}


def thread(
    name: str, op: str, why: str, ranks: int = 1
) -> Callable[[Callable[[bool], None]], Callable[[bool], None]]:
    """Add the decorated function to `THREADS`."""

    def added(run: Callable[[bool], None]) -> Callable[[bool], None]:
        THREADS[name] = Thread(name, op, why, run, ranks)
        return run

    return added


def train(model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> None:
    """Train as everybody does, on random token ids."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        loss = loss_of(torch.randint(WORDS, (BATCH, LENGTH)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def padding() -> Tensor:
    """Return which tokens are text `[BATCH, LENGTH]`, in rows of different lengths."""
    return torch.arange(LENGTH) >= torch.tensor([[0], [1], [4], [2]])


@thread("huggingface/trl#2175", "nll_loss", "mean")
def micro_batches(fixed: bool) -> None:
    """Each of four micro-batches divides by its own number of labels; fixed, it is one batch."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))
    optimizer = torch.optim.AdamW(model.parameters())
    n_parts = 1 if fixed else 4
    for _ in range(STEPS):
        ids = torch.randint(WORDS, (BATCH, LENGTH))
        labels = ids.masked_fill(~padding(), -100)
        optimizer.zero_grad()
        for x, y in zip(ids.chunk(n_parts), labels.chunk(n_parts), strict=True):
            logits = model(x)[:, :-1].flatten(0, 1)
            (F.cross_entropy(logits, y[:, 1:].flatten()) / n_parts).backward()
        optimizer.step()


@thread("karpathy/build-nanogpt!30", "allreduce", "all-reduce", ranks=2)
def late_synchronization(fixed: bool) -> None:
    """DDP reads `require_backward_grad_sync` in the forward pass, which comes before it is set."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(4):
            x, y = torch.randn(BATCH, WIDTH), torch.randint(WORDS, (BATCH,))
            if fixed:
                model.require_backward_grad_sync = part == 3
            loss = F.cross_entropy(model(x), y) / 4
            if not fixed:
                model.require_backward_grad_sync = part == 3
            loss.backward()
        optimizer.step()


class DroppingBlock(nn.Module):
    """A residual block that drops entries by random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        update = torch.tanh(self.inner(x))
        return x + update * (torch.rand_like(update) >= 0.1) / 0.9


@thread("allenai/OLMo-core!828", "rand_like|uniform", "random numbers")
def other_masks_in_the_backward_pass(fixed: bool) -> None:
    """Checkpointed blocks draw other masks in the backward pass; fixed, it has no checkpoints."""
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    blocks = nn.ModuleList(DroppingBlock() for _ in range(2))

    def loss_of(ids: Tensor) -> Tensor:
        x = table(ids)
        for block in blocks:
            if fixed:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return F.cross_entropy(head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    train(nn.ModuleList([table, blocks, head]), loss_of)


@thread("huggingface/transformers#47394", "constant_pad_nd|nll_loss", "shift|pad")
def labels_shifted_twice(fixed: bool) -> None:
    """The model shifts the labels, and its loss shifts them again: t is to predict t + 2."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))

    def causal_loss(logits: Tensor, labels: Tensor, shifted: Tensor | None = None) -> Tensor:
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits, shifted.flatten())

    def loss_of(ids: Tensor) -> Tensor:
        logits, labels = model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        return causal_loss(logits, labels, shifted=labels if fixed else None)

    train(model, loss_of)


@thread("NVIDIA/TensorRT-Model-Connect#663", "gelu", "approximate")
def approximate_gelu(fixed: bool) -> None:
    """A port computes the tanh approximation of GELU for a checkpoint of the exact one."""
    gelu = nn.GELU(approximate="none" if fixed else "tanh")
    mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), gelu, nn.Linear(16, WIDTH))
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def loss_of(ids: Tensor) -> Tensor:
        x = table(ids)
        return F.cross_entropy(head(x + mlp(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    train(nn.ModuleList([table, mlp, head]), loss_of)


class TinyGPT(nn.Module):
    """A decoder of one layer with learned absolute positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, is_text: Tensor, places: Tensor | None = None) -> Tensor:
        """Return logits `[row, token, word]`; places count from 0, unless given."""
        if places is None:
            places = torch.arange(ids.shape[1])[None]
        x = self.words(ids) + self.places(places)
        seen = is_text[:, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        seen = seen | torch.eye(LENGTH, dtype=torch.bool)
        x = x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=seen)
        return self.head(x)


@thread("ndif-team/nnsight#672", "cumsum|arange|embedding", "cumsum|arange")
def positions_of_padding(fixed: bool) -> None:
    """Rows are padded on the left, and the positions count the padding, too."""
    model, is_text = TinyGPT(), padding()

    def loss_of(ids: Tensor) -> Tensor:
        places = (is_text.cumsum(-1) - 1).clamp(min=0) if fixed else None
        labels = ids.masked_fill(~is_text, -100)[:, 1:]
        return F.cross_entropy(model(ids, is_text, places)[:, :-1].flatten(0, 1), labels.flatten())

    train(model, loss_of)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs of entries of each token by its angles `[token, pair]`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


@thread("huggingface/transformers!29285", "bmm|mm|_to_copy", "bfloat16")
def positions_in_bfloat16(fixed: bool) -> None:
    """Autocast computes the angles of rotary positions in bfloat16, with 8 significant bits."""
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    q, k, v = qkv
    frequencies = 10000.0 ** (-torch.arange(0, 1, 2 / WIDTH))
    places = 1000.0 + torch.arange(LENGTH)

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            off = torch.autocast("cpu", enabled=False) if fixed else contextlib.nullcontext()
            with off:
                angles = places[:, None] @ frequencies[None]
            x = table(ids)
            scores = rotated(q(x), angles) @ rotated(k(x), angles).mT / WIDTH**0.5
            x = x + scores.softmax(-1) @ v(x)
            return F.cross_entropy(head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    train(nn.ModuleList([table, qkv, head]), loss_of)


@thread("NVIDIA-NeMo/Automodel#2571", r"^weight 2\.weight", "a checkpoint")
def head_from_the_embedding(fixed: bool) -> None:
    """The head was trained apart from the embedding; a resumed run replaces it by the embedding."""
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    model = nn.Sequential(table, nn.LayerNorm(WIDTH), head)
    saved = {name: x + 0.1 * torch.randn_like(x) for name, x in model.state_dict().items()}
    if not fixed:
        saved["2.weight"] = saved["0.weight"]
    model.load_state_dict(saved)
    train(
        model, lambda ids: F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    )


@thread("AnswerDotAI/ModernBERT!40", "attention", "attn_mask")
def attention_to_padding(fixed: bool) -> None:
    """Attention is not given the mask and attends to the padding, as one of two backends did."""
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    q, k, v = qkv
    is_text = padding()

    def loss_of(ids: Tensor) -> Tensor:
        x = table(ids)
        heads = [layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (q, k, v)]
        mask = is_text[:, None, None] if fixed else None
        x = x + F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(head(x)[is_text], ids[is_text])

    train(nn.ModuleList([table, qkv, head]), loss_of)


@thread("pytorch/vision#8250", "batch_norm", "momentum")
def momentum_of_another_framework(fixed: bool) -> None:
    """BatchNorm has the momentum of TensorFlow, 0.99, which is 0.01 in PyTorch."""
    momentum = 0.01 if fixed else 0.99
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH, momentum=momentum), nn.ReLU(), nn.Flatten()
    ).append(nn.Linear(WIDTH * 16, WORDS))
    optimizer = torch.optim.AdamW(model.parameters())
    held_out = torch.randn(BATCH, 3, 6, 6)
    for _ in range(STEPS):
        x, y = torch.randn(BATCH, 3, 6, 6), torch.randint(WORDS, (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model.train()(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("thread", choices=THREADS)
    parser.add_argument("--fixed", action="store_true")
    options = parser.parse_args()
    chosen = THREADS[options.thread]
    if chosen.ranks > 1:  # under torchrun
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    chosen.run(options.fixed)
