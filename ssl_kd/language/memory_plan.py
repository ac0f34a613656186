"""Plan the memory of a run from the configurations of its models, without loading any weights.

Weights are counted exactly, on torch's meta device. Activations are those of a forward pass with
fake tensors as on a CPU, of which one and two layers are measured. The CUDA context is a guess.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.language.settings import LanguageSettings
from ssl_kd.losses.token_terms import CHUNK_BYTES, chunk_rows
from ssl_kd.precision import DeviceInfo, Precision
from ssl_kd.teachers.causal import auto_model, llm_module
from ssl_kd.teachers.dtypes import halve_products
from ssl_kd.teachers.frozen import hidden_states
from ssl_kd.teachers.student import add_lora, changed_config

logger = logging.getLogger(__name__)

T4 = Precision.for_device(DeviceInfo("cuda", "T4", (7, 5)), torch.float16)  # as on a P100
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # of a weight, with the scales of its blocks
CONTEXT, BACKWARD = 512 << 20, 1.4  # of CUDA; of a layer's activations with their gradients
# Float32 matrices [chunk, vocabulary] at the peak of the loss, by the kind of teacher (measured).
LOSS_MATRICES = {"none": 4.5, "cached": 5.5, "live": 8.3}


def memory_plan(
    settings: LanguageSettings, student: Any, teacher: Any = None, precision: Precision = T4
) -> dict[str, dict[str, int]]:
    """Return the bytes that a run in one process needs, by phase and kind of tensor.

    On the device: a step of `training`, and with TEACHER_CACHE the `teacher` while it is scored or
    writes the cache. On the `host`: the guard's last good state and the best student. `student` and
    `teacher` are configurations of transformers.
    """
    model = _model(student, precision, settings)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = int(trained * (2 + 8 / 256 if settings.optim.endswith("8bit") else 8))
    cached = settings.teacher_cache is not None or settings.teacher_url is not None
    kind = "cached" if cached else "none" if teacher is None else "live"
    tokens, text = settings.batch_size * settings.block_size, student.get_text_config()
    one, two = (_saved_bytes(student, settings, precision, depth) for depth in (1, 2))
    layer, outside, again = two - one, 2 * one - two, 0
    if settings.gradient_checkpointing:  # keeps the input of each layer, and runs it again
        layer, again = tokens * text.hidden_size * 4, int(layer * BACKWARD)
    loss = _loss_bytes(model.get_output_embeddings().weight, tokens, precision, kind)
    training = {
        "frozen weights": _frozen_bytes(model, settings.quantization == "nf4"),
        "trained weights": 4 * trained,
        "gradients": 4 * trained,
        "optimizer": state,
        "activations": outside + text.num_hidden_layers * layer,
        "loss, or a layer again": max(loss, again),
    }
    context = {"CUDA context": CONTEXT if precision.device.type == "cuda" else 0}
    host = {"guard": 4 * trained + state, "best student": 4 * trained}
    plan = {"training": training | context, "host": host}
    if teacher is not None:
        apart = {"logits": 5 * CHUNK_BYTES, **context}
        phase = plan["training"] if kind == "live" else plan.setdefault("teacher", apart)
        phase["teacher"] = _frozen_bytes(_model(teacher, precision), bool(settings.quantization))
    return plan


def describe_plan(plan: dict[str, dict[str, int]]) -> str:
    """Return a line for each phase of a plan, in GiB."""
    lines = ["memory plan in GiB, computed from the configurations:"]
    for phase, kinds in plan.items():
        parts = ", ".join(f"{kind} {n / 2**30:.2f}" for kind, n in kinds.items())
        lines.append(f"  {phase} {sum(kinds.values()) / 2**30:.2f}: {parts}")
    return "\n".join(lines)


def plan_of_run(settings: LanguageSettings, precision: Precision) -> dict[str, Any] | None:
    """Log and return the plan of a run on a GPU; None for models without a saved configuration."""
    if precision.device.type != "cuda":
        return None
    names = [settings.student_model, *settings.teacher_names[: settings.teacher_model != "none"]]
    load = llm_module("transformers").AutoConfig.from_pretrained
    try:
        configs = [load(name, trust_remote_code=settings.trust_remote_code) for name in names]
        plan = memory_plan(settings, *configs, precision=precision)
    except Exception as error:  # each architecture raises its own exceptions
        logger.info("there is no memory plan for these models (%s)", type(error).__name__)
        return None
    logger.info("%s", describe_plan(plan))
    return plan


def _model(config: Any, precision: Precision, run: Any = None, depth: int | None = None) -> Any:
    """Build a model without weights: the student of the settings `run`, or a teacher for None."""
    kept = range(depth or config.get_text_config().num_hidden_layers)
    config = llm_module("transformers").AutoConfig.for_model(**changed_config(config, kept, {}))
    dtype = precision.teacher if run is None else torch.float32
    with torch.device("meta"):
        model = auto_model(config).from_config(config, dtype=dtype)
        if run is None:
            return model.requires_grad_(False)
        if run.lora_rank:
            model = add_lora(model, run.lora_rank, **run.lora_options)
            if precision.student != torch.float32:
                halve_products(model, precision.student)
    return model.train()


def _frozen_bytes(model: Any, in_4_bits: bool) -> int:
    """Return the bytes of the frozen weights, with linear layers in NF4 if `in_4_bits`."""
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    in_nf4 = set(linear if in_4_bits else ())
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return sum(int(p.numel() * (NF4_BYTES if p in in_nf4 else p.itemsize)) for p in frozen)


def _loss_bytes(head: Tensor, tokens: int, precision: Precision, kind: str) -> int:
    """Return the peak of the loss: a chunk of logits, hidden states, and the head in half."""
    chunk, hidden = min(tokens, chunk_rows(len(head), precision.device)), tokens * head.shape[1]
    halves = 2 * (head.numel() + hidden) if precision.student != torch.float32 else 0
    gradients = 4 * (2 * hidden + head.numel() * head.requires_grad)
    return int(4 * LOSS_MATRICES[kind] * chunk * len(head)) + halves + gradients


@functools.cache  # tied weights stay tied
def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", requires_grad=x.requires_grad)


def _saved_bytes(config: Any, settings: LanguageSettings, precision: Precision, depth: int) -> int:
    """Return what a forward pass of `depth` layers keeps for the backward pass, without weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, kept = _model(config, precision, settings, depth), {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    cast = torch.autocast("cpu", precision.student, precision.student != torch.float32)
    with FakeTensorMode(), cast, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                store.update({name: _fake(x) for name, x in store.items() if x is not None})
        ids = torch.zeros(settings.batch_size, settings.block_size, dtype=torch.int64)
        hidden_states(model, {"input_ids": ids, "position_ids": ids})
    weights = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    _fake.cache_clear()
    return sum(storage.nbytes() for key, storage in kept.items() if key not in weights)
