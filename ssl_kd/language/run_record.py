"""What a run logs and writes about itself: models, data, first steps, outcome, and errors."""

from __future__ import annotations

import logging
import shlex
from typing import Any

import torch

from ssl_kd.datasets.aligned import AlignedBlocks
from ssl_kd.datasets.render import describe_turns
from ssl_kd.guard.diagnosis import Cause
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.language.best_student import Best
from ssl_kd.language.prepare import Task
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import Distiller, StudentStep
from ssl_kd.teachers.causal import CausalLM, without_adapters
from ssl_kd.training.folder import versions

logger = logging.getLogger(__name__)

FIRST_STEPS = 5  # whose loss terms are logged


def about(task: Task) -> dict[str, Any]:
    """Return the facts about models, data and the settings left to them for `config.json`."""

    def model(lm: CausalLM | None) -> dict[str, Any] | None:
        if lm is None or lm.model is None:
            return lm and {"name": lm.name}
        config = lm.model.config.get_text_config()
        return {
            "name": lm.name,
            "parameters": sum(p.numel() for p in lm.model.parameters()),
            "trained": sum(p.numel() for p in lm.model.parameters() if p.requires_grad),
            "vocabulary": config.vocab_size,
            "layers": config.num_hidden_layers,
        }

    own = task.blocks.student if isinstance(task.blocks, AlignedBlocks) else task.blocks
    return {
        "teacher": model(task.teacher),
        **({"beside": [model(other.lm) for other in task.others]} if task.others else {}),
        "student": model(task.student),
        "data": {
            "name": task.train_set.name,
            "documents": len(task.train_set),
            "train_tokens": int(own.counts.sum()),
            "eval_tokens": int(task.eval_blocks.counts.sum()),
            "validation_tokens": int(task.validation_blocks.counts.sum()),
            "validated_apart": task.validated_apart,
            "turns": describe_turns(own.turns),
            "left_out": [*task.train_set.left_out, *own.left_out],
        },
        "resolved": {
            "LEARNING_RATE": task.settings.peak_lr,
            "DIVERGENCE": task.settings.kind_of_divergence,
            "ROUTER_MODE": task.settings.router_mode,
        },
    }


def made_by(task: Task) -> dict[str, str]:
    """Return how the student was made, for its model card."""
    usual = LanguageSettings().to_dict()
    changed = {n: v for n, v in task.settings.to_dict().items() if v != usual[n]}
    names = [lm.name for lm in (task.teacher, *(other.lm for other in task.others)) if lm]
    data = task.train_set
    return {
        "teacher": ", ".join(names) or "none",
        "data": f"{data.name}, {len(data):,} documents (SHA-256 {data.digest[:16]})",
        "settings": ", ".join(f"{n} {v!r}" for n, v in changed.items()) or "as they come",
        "versions": ", ".join(f"{n} {v}" for n, v in versions().items()),
    }


def facts(task: Task, distiller: Distiller, steps: int) -> dict[str, Any]:
    """Return the facts for `metrics.json` beside the scores."""
    aligned = task.blocks if isinstance(task.blocks, AlignedBlocks) else None
    return {
        "tokens": distiller.tokens,
        "success_rate": int(distiller.guard.updates[0]) / steps,
        "learned_from": distiller.learned,
        "cache": task.caches[0].facts() if task.caches else None,
        "alignment": None if aligned is None else aligned.statistics(),
    }


def first_forward(task: Task) -> str:
    """What goes into the loss, in one line."""
    settings = task.settings
    sides = {"student": task.student.model}
    if task.frozen is not None:
        sides["teacher"] = task.frozen.model
    rows = f"{settings.batch_size}, {settings.block_size}"
    heads = {who: without_adapters(lm).get_output_embeddings() for who, lm in sides.items()}
    logits = ", ".join(f"{who} [{rows}, {len(head.weight)}]" for who, head in heads.items())
    return (
        f"logits: {logits}; temperature {settings.temperature:g}, by whose square "
        f"{settings.temperature**2:g} the divergence is multiplied; weights: "
        f"ce {settings.alpha_ce:g}, kd {settings.alpha_kd:g}"
        + (f", hidden {settings.alpha_hidden:g}" if settings.alpha_hidden else "")
    )


def say_step(step: int, result: StudentStep) -> None:
    """Log the first steps."""
    if step < FIRST_STEPS:
        terms = ", ".join(f"{name} {value:.4f}" for name, value in result.terms.items())
        terms += f", combined loss {result.loss:.4f}"
        logger.info("step %d: %s, gradient norm %.3g", step + 1, terms, result.grad_norm)


def log_training_outcome(distiller: Distiller, best: Best) -> None:
    """Warn of a training that did not help, and of loss terms that took no part in every step."""
    done = distiller.guard.steps
    if best.step == 0:
        logger.warning(
            "training did not improve the held-out score: the student is saved as it was before "
            "step 0"
        )
    for name, learned in distiller.learned.items():
        if learned < done:
            logger.warning("%s learned from %d of %d steps", name, learned, done)


def why(error: TooFewHealthyParts, distiller: Distiller) -> str:
    """Why the run stopped: each cause that was found, the first recorded fault, and what to try."""
    events = distiller.guard.events
    causes = [event for event in events.events if event.action == "explained"]
    once = {e.reason: f"{e.part}, step {e.step}: {e.reason}" for e in reversed(causes)}
    lines = [str(error), *reversed(once.values())]
    if tries := advice(distiller):
        lines.append(tries)
    if bundles := distiller.explainer.bundles():
        lines.append(f"ssl_kd replay {shlex.quote(str(bundles[0]))} runs the first fault again")
    return "\n".join(lines)


def advice(distiller: Distiller) -> str:
    """Settings that a run which stopped could be tried with, as flags; empty where none would help.

    Those that the diagnoses name; without a diagnosis those that calm any training.
    """
    settings = distiller.began
    found = [d for d in distiller.explainer.diagnoses if d.cause != Cause.UNKNOWN]
    tries: dict[str, Any] = {change.setting: change.value for d in found for change in d.advice}
    if not found:
        tries = {"learning_rate": min(settings.peak_lr / 5, settings.usual_lr)}
        if settings.clip_grad is None or settings.clip_grad > 0.5:
            tries["clip_grad"] = 0.5
        if settings.grad_norm_threshold is not None:
            tries["grad_norm_threshold"] = None
        if distiller.source is not None and settings.temperature < 2:
            tries["temperature"] = 2.0
        if distiller.precision.student != torch.float32:
            tries["model_dtype"] = "float32"
    flags = [f"--{n} {v:.2g}" if isinstance(v, float) else f"--{n} {v}" for n, v in tries.items()]
    return f"Settings to try: {' '.join(flags)}" if flags else ""
