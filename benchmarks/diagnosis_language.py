"""Inject faults of known cause into steps of random language models, for `benchmarks.diagnosis`.

Each fault goes through `Distiller.step`; the event of its fault explainer is the diagnosis. The
true operation is the one that reads a poisoned weight, the last one of an inserted layer, or, for
overflows, the only one of the step with finite inputs and a non-finite output. A draw with several
such operations is repeated, because its true operation is uncertain.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.diagnosis import is_finite, uniform
from firstnan.diagnosis import Cause
from ssl_kd.core.precision import Precision
from ssl_kd.language.losses.divergences import DIVERGENCES
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.text.blocks import Batch, Blocks
from ssl_kd.language.train.step import Distiller

CPU = Precision.for_device("cpu")
HALF = replace(CPU, student=torch.float16, teacher=torch.float16, scale=True)


@dataclass
class Case:
    """A training step with an injected fault, and its true operation and cause."""

    cause: Cause
    distiller: Distiller
    batch: Batch
    op: str | None = None  # None: the only operation that turns finite inputs non-finite

    @property
    def weights(self) -> list[nn.Parameter]:
        """The student's weights."""
        return list(self.distiller.student.parameters())

    def is_sick(self) -> bool:
        """Do the step; return whether the fault explainer looked for a fault."""
        self.distiller.step([self.batch], 1e-3)
        return bool(self.explanations)

    @property
    def explanations(self) -> list[str]:
        """What the fault explainer reported."""
        return [e.reason for e in self.distiller.guard.events.events if e.stage == "replay"]

    def diagnosed(self) -> tuple[Cause, str]:
        """Return the diagnosed cause and operation."""
        reason = self.explanations[0]
        match = re.match(r"rows [\d, ]+: (\S+), (?:forward|backward) pass", reason)
        causes = [cause for cause in Cause if f": {cause.value}: " in reason]
        return (causes[0], match[1]) if match and causes else (Cause.UNKNOWN, "none")

    def origin(self) -> str | None:
        """Return the only operation that produced a non-finite value; None if several did."""
        with Origins() as origins, torch.random.fork_rng():
            terms = self.distiller.weighted(self.distiller.terms(self.batch))
            total = sum(terms.values(), torch.zeros(()))
            torch.autograd.grad(total, self.weights, allow_unused=True)
        return origins.ops.pop() if len(origins.ops) == 1 else None


class Origins(TorchDispatchMode):
    """Records the names of operations with finite inputs and a non-finite output in `ops`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204, D105
        kwargs = kwargs or {}
        finite_inputs = is_finite((args, kwargs))  # before in-place writes
        out = func(*args, **kwargs)
        op = str(func.overloadpacket)
        if finite_inputs and "empty" not in op and not is_finite(out):
            self.ops.add(op)
        return out


# --- random steps ---------------------------------------------------------------------------------


def model(r: random.Random, kind: str, vocabulary: int) -> Any:
    """Return a causal LM with random sizes and weights, in evaluation mode."""
    heads = r.choice([2, 4])
    width, layers = heads * 4 * r.randint(1, 3), r.randint(1, 2)
    size = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "GPT2":
        size |= {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 64}
    else:
        size |= {"hidden_size": width, "intermediate_size": 8 * r.randint(1, 6), "pad_token_id": 2}
        size |= {"num_hidden_layers": layers, "num_attention_heads": heads}
        size |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    if kind == "Mixtral":
        size |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{kind}Config")(**size, attn_implementation="eager")
    lm = transformers.AutoModelForCausalLM.from_config(config).eval()
    spread = uniform(r, 0.05, 0.3)
    for p in lm.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, 0, spread)
    return lm


def step(
    r: random.Random, cause: Cause, precision: Precision = CPU, kinds=("Llama", "GPT2", "Mixtral")
) -> Case:
    """Return a healthy step for the caller to inject a fault into."""
    vocabulary, rows, length = r.randint(20, 200), r.randint(1, 6), r.randint(6, 20)
    alpha = uniform(r, 0.1, 0.9)
    settings = LanguageSettings(
        divergence=r.choice([*DIVERGENCES]),
        temperature=uniform(r, 0.5, 4.0),
        alpha_kd=alpha,
        alpha_ce=1 - alpha,
        batch_size=rows,
        max_steps=10,
        model_dtype=str(precision.student).removeprefix("torch."),
    )
    ids = torch.randint(3, vocabulary, (rows, length))
    documents = torch.ones(rows, length, dtype=torch.int32)
    counts = torch.arange(length).expand(rows, -1) >= r.randint(0, 3)
    lengths = torch.ones(rows, dtype=torch.int64)
    blocks = Blocks(ids, counts.clone(), documents, lengths, (), "random")
    student, teacher = (model(r, r.choice(kinds), vocabulary) for _ in range(2))
    source = Live(FrozenTeacher(teacher, dtype=precision.teacher))
    distiller = Distiller(student, settings, precision, source)
    return Case(cause, distiller, blocks.batch(range(rows)))


def teacher_of(case: Case) -> Any:
    return case.distiller.teacher.models["teacher"]


def layers_of(lm: Any) -> Any:
    return lm.model.layers if hasattr(lm, "model") else lm.transformer.h


READERS = {
    "Linear": "aten.mm",  # none has a bias
    "Conv1D": "aten.addmm",
    "LlamaRMSNorm": "aten.mul",
    "MixtralRMSNorm": "aten.mul",
    "LayerNorm": "aten.native_layer_norm",
    "MixtralTopKRouter": "aten.mm",
    "MixtralExperts": "aten._grouped_mm",
}


def readers(lm: Any) -> list[tuple[Tensor, str]]:
    """Return all weights but the embeddings, each with the operation that reads it."""
    weights: list[tuple[Tensor, str]] = []
    for name, module in lm.named_modules():
        if name == "lm_head" and hasattr(lm, "transformer"):
            continue  # GPT-2's head is its embedding
        op = READERS.get(type(module).__name__)
        weights += [(p, op) for p in module.parameters(recurse=False) if op is not None]
    return weights


def poison(r: random.Random, case: Case, lm: Any) -> Case:
    """Make one entry or row of a weight non-finite, or one entry far too large."""
    weight, op = r.choice(readers(lm))
    value = r.choice([float("nan"), float("inf"), -float("inf"), 1e30, 3e38])
    if abs(value) < float("inf") or r.random() < 0.5:
        weight.data.view(-1)[r.randrange(weight.numel())] = value
    else:
        weight.data[r.randrange(len(weight))] = value
    return replace(case, op=None if abs(value) < float("inf") else op)


def poisoned_student(r: random.Random) -> Case:
    case = step(r, Cause.POISONED_WEIGHT)
    return poison(r, case, case.distiller.student)


def poisoned_teacher(r: random.Random) -> Case:
    case = step(r, Cause.POISONED_WEIGHT)
    return poison(r, case, teacher_of(case))


def poisoned_embedding(r: random.Random) -> Case:
    """Poison the embedding of a token in the batch."""
    case = step(r, Cause.POISONED_WEIGHT)
    lm: Any = r.choice([case.distiller.student, teacher_of(case)])
    row = lm.get_input_embeddings().weight.data[int(case.batch.input_ids[0, 0])]
    value = r.choice([float("nan"), float("inf")])
    row[:] = value if r.random() < 0.5 else row.index_fill(0, torch.tensor([0]), value)
    case.op = "aten.embedding"
    return case


def learning_rate(r: random.Random) -> Case:
    """Take real steps at a huge learning rate until the next one overflows."""
    case = step(r, Cause.LEARNING_RATE)
    rate = uniform(r, 1e4, 1e17)
    for _ in range(3):
        weights = [p.clone() for p in case.distiller.student.parameters()]
        if not case.distiller.step([case.batch], rate).updated:
            break
    else:
        return case
    fresh = Distiller(case.distiller.student, case.distiller.settings, CPU, case.distiller.teacher)
    for p, weight in zip(fresh.student.parameters(), weights, strict=True):
        p.data.copy_(weight)
    return replace(case, distiller=fresh)


# --- inserted layers ------------------------------------------------------------------------------


def insert(r: random.Random, lm: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Apply a change to the feed-forward output of a random layer."""
    module = r.choice(list(layers_of(lm))).mlp

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        first = change(out[0] if isinstance(out, tuple) else out)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    module.register_forward_hook(hook)


def fp16_overflow(r: random.Random) -> Case:
    """Scale up the activations inside a random layer of the student or the teacher."""
    case = step(r, Cause.FP16_OVERFLOW, HALF, kinds=("Llama", "GPT2"))
    lm = r.choice([case.distiller.student, teacher_of(case)])
    loud = torch.full((1,), uniform(r, 1e3, 6e4), dtype=torch.float16)
    layer = r.choice(list(layers_of(lm)))
    inside = [m for m in layer.modules() if isinstance(m, nn.Linear) or hasattr(m, "nf")]
    r.choice(inside).register_forward_hook(lambda module, args, out: out * loud)
    return case


def log_of_zero(r: random.Random) -> Case:
    case = step(r, Cause.LOG_OF_ZERO)
    sharp = torch.full((1,), uniform(r, 1e4, 1e6))
    insert(r, case.distiller.student, lambda x: x + 0 * torch.softmax(x * sharp, -1).log())
    case.op = "aten.log"
    return case


def zero_norm(r: random.Random) -> Case:
    case = step(r, Cause.ZERO_NORM)
    forms: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("aten.div", lambda z: z / z.norm(dim=-1, keepdim=True)),
        ("aten.div", lambda z: z / z.square().sum(-1, keepdim=True).sqrt()),
        ("aten.rsqrt", lambda z: z * z.square().sum(-1, keepdim=True).rsqrt()),
        ("aten.div", lambda z: z.square().sum(-1, keepdim=True).sqrt()),  # only its gradient
    ]
    case.op, form = r.choice(forms)
    keep = torch.ones(case.batch.input_ids.shape[1], 1)
    keep[r.randrange(max(1, len(keep) // 2))] = 0
    insert(r, case.distiller.student, lambda x: x + form(x * keep))
    return case


def temperature(r: random.Random) -> Case:
    """Insert a gate whose exponential overflows, but would not at a temperature of 1."""
    case = step(r, Cause.TEMPERATURE)
    t = uniform(r, 1e-3, 0.3)
    multiplies = r.random() < 0.3

    def gate(x: Tensor) -> Tensor:
        z = torch.tanh(x) * 40
        return x * ((z * (1 / t)) if multiplies else (z / t)).exp()

    insert(r, case.distiller.student, gate)
    case.op = "aten.exp"
    return case


KINDS = (poisoned_student, poisoned_teacher, poisoned_embedding, learning_rate)
KINDS += (fp16_overflow, log_of_zero, zero_norm, temperature)
