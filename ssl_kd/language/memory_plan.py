"""Plan the memory of a run from the configurations of its models, without loading any weights.

Weights are counted exactly, on the meta device. A step of one and of two layers runs with fake
tensors as on a CPU, and the loss on the meta device. The CUDA context is a guess.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssl_kd.core.precision import DeviceInfo, Precision
from ssl_kd.language.losses.divergences import divergence_named
from ssl_kd.language.losses.teacher_output import (
    LinearTeacher,
    SampledTeacher,
    TeacherOutput,
    TopKTeacher,
)
from ssl_kd.language.losses.token_terms import (
    CHUNK_BYTES,
    ChunkedLogits,
    TokenObjective,
    chunk_rows,
    compute_terms,
)
from ssl_kd.language.models.causal import auto_model, llm_module, load_config
from ssl_kd.language.models.dtypes import halve_products
from ssl_kd.language.models.frozen import hidden_states
from ssl_kd.language.models.student import add_lora, changed_config
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.train.objective import checkpoint_activations

logger = logging.getLogger(__name__)

T4 = Precision.for_device(DeviceInfo("cuda", "T4", (7, 5)), torch.float16)  # as on a P100
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # of a weight, with the scales of its blocks
CONTEXT = 512 << 20  # of CUDA


class LayerBytes(NamedTuple):
    """Bytes that some layers need in a step."""

    kept: int  # activations, for the backward pass
    layers_peak: int  # of the backward pass, until the gradient of the embedded tokens
    embedding_peak: int  # from there to the end; the same if this gradient is not needed


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
    one, two = (_layer_bytes(student, settings, precision, depth) for depth in (1, 2))
    n_more = student.get_text_config().num_hidden_layers - 1  # layers after the first
    activations = one.kept + n_more * (two.kept - one.kept)
    backward_peak = one.layers_peak + n_more * (two.layers_peak - one.layers_peak)
    recomputed = max(backward_peak, two.embedding_peak) - activations
    teacher_model = None if teacher is None else _model(teacher, precision)
    heads: list[Any] = [m and m.get_output_embeddings().weight for m in (model, teacher_model)]
    loss = _loss_bytes(settings, precision, *heads)
    training = {
        "frozen weights": _frozen_bytes(model, settings.quantization == "nf4"),
        "trained weights": 4 * trained,
        "gradients": 4 * trained,
        "optimizer": state,
        "activations": activations,
        "loss or recomputed layer": max(loss, recomputed),  # the larger: one follows the other
    }
    context = {"CUDA context": CONTEXT if precision.device.type == "cuda" else 0}
    host = {"guard": 4 * trained + state, "best student": 4 * trained}
    plan = {"training": training | context, "host": host}
    if teacher_model is not None:
        apart = {"logits": 5 * CHUNK_BYTES, **context}
        is_live = settings.teacher_cache is None and settings.teacher_url is None
        phase = plan["training"] if is_live else plan.setdefault("teacher", apart)
        phase["teacher"] = _frozen_bytes(teacher_model, bool(settings.quantization))
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
    names = [settings.student_model]
    if settings.teacher_model != "none":
        names += settings.teacher_names
    try:
        configs = [load_config(name, remote_code=settings.trust_remote_code) for name in names]
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


@torch.no_grad()
def _loss_bytes(
    settings: LanguageSettings, precision: Precision, head: Tensor, teacher_head: Tensor | None
) -> int:
    """Return the peak of the loss, of which one chunk of logits is in memory at a time."""
    n, (vocabulary, width) = settings.batch_size * settings.block_size, head.shape
    chunk = min(n, chunk_rows(vocabulary, precision.device))
    autocast = None if precision.student == torch.float32 else precision.student
    new = functools.partial(torch.empty, device="meta")
    with AllocatedBytes([head] if teacher_head is None else [head, teacher_head]) as memory:
        teachers: list[TeacherOutput] = []
        cached = settings.teacher_cache is not None or settings.teacher_url is not None
        method, k = settings.cache_spec if cached else ("hidden", 0)
        if teacher_head is not None and method == "hidden":
            hidden = new(n, teacher_head.shape[1], dtype=precision.teacher)
            teachers.append(LinearTeacher(hidden, teacher_head))
        elif teacher_head is not None:
            kind = SampledTeacher if method == "sample" else TopKTeacher
            teachers.append(kind(new(n, k, dtype=torch.int32), new(n, k), new(n)))
        objective = TokenObjective(
            new(n, dtype=torch.int64),
            teachers,
            [1.0] * len(teachers),
            settings.temperature,
            divergence_named(settings.kind_of_divergence),
            vocabulary if teacher_head is None else min(vocabulary, len(teacher_head)),
            None,
            chunk,
            autocast,
            wait=False,  # only rows near 0 would differ
        )
        needs = (True, head.requires_grad, False)
        logits = ChunkedLogits(new(n, width), head, None, chunk, autocast, needs)
        compute_terms(logits, objective, (settings.alpha_ce, settings.alpha_kd))
    return memory.peak


@functools.cache  # tied weights stay tied
def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", requires_grad=x.requires_grad)


class AllocatedBytes(TorchDispatchMode):
    """Count the bytes of the tensors that are made inside, now and at the peak.

    The tensors `known` before, such as weights, do not count.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {x.untyped_storage()._cdata: 0 for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storages of its results that are new."""
        results = func(*args, **(kwargs or {}))
        for storage in [x.untyped_storage() for x in tree_leaves(results) if torch.is_tensor(x)]:
            if (key := storage._cdata) not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, key)
        return results

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _layer_bytes(
    config: Any, settings: LanguageSettings, precision: Precision, depth: int
) -> LayerBytes:
    """Return what `depth` layers keep for the backward pass, and the peaks of that pass.

    Weights and their gradients of earlier batches do not count.
    """
    model, layers_peak = _model(config, precision, settings, depth), 0
    if settings.gradient_checkpointing:
        checkpoint_activations(model)

    def end_layers(gradient: Tensor) -> None:
        nonlocal layers_peak
        layers_peak, memory.peak = memory.peak, memory.now

    def follow(module: nn.Module, arguments: Any, embedded: Tensor) -> None:
        if embedded.requires_grad:
            embedded.register_hook(end_layers)

    model.get_input_embeddings().register_forward_hook(follow)
    autocast = torch.autocast("cpu", precision.student, precision.student != torch.float32)
    with FakeTensorMode():
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                store.update({name: _fake(x) for name, x in store.items() if x is not None})
        _fake.cache_clear()
        known = [*model.parameters(), *model.buffers()]
        for weight in [x for x in known if x.requires_grad]:
            weight.grad = torch.empty_like(weight)  # of the batches before
            known.append(weight.grad)
        ids = torch.zeros(settings.batch_size, settings.block_size, dtype=torch.int64)
        with AllocatedBytes(known) as memory:
            with autocast:
                hidden = hidden_states(model, {"input_ids": ids, "position_ids": ids})
            kept, head = memory.now, model.get_output_embeddings().weight
            loss = (2 * hidden).sum()  # whose gradients are whole tensors, as of a real loss
            if head.requires_grad:
                loss = loss + (2 * head).sum()
            del hidden
            memory.peak = memory.now
            loss.backward()
    return LayerBytes(kept, layers_peak or memory.peak, memory.peak)
