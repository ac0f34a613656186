"""Collect the facts that a language run writes to its files, and log how it goes."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import torch

from firstnan.diagnosis import Cause
from firstnan.faults import SKIPPED, Stage
from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.errors import first_few, printable
from ssl_kd.core.files import atomic_write_text
from ssl_kd.core.runs.folder import versions
from ssl_kd.core.runs.schedule import warmup_length
from ssl_kd.language.models.card import without_folders
from ssl_kd.language.models.causal import CausalLM, without_adapters
from ssl_kd.language.prepare import Prepared
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.text.aligned import AlignedBlocks
from ssl_kd.language.text.render import describe_turns
from ssl_kd.language.text.sample_rows import describe_row, sample_rows
from ssl_kd.language.train.step import Distiller, StudentStep

logger = logging.getLogger(__name__)

_OF_THE_MACHINE = frozenset(
    "DEVICE HUB_MODEL_ID HUB_PRIVATE_REPO PUSH_TO_HUB REPORT_TO RESUME RUNS_DIR RUN_NAME".split()
)
FIRST_STEPS = 5  # whose loss terms are logged


def config_facts(prepared: Prepared) -> dict[str, Any]:
    """Return the facts about models, data and resolved settings for `config.json`."""
    settings = prepared.settings
    train_set = prepared.train_set
    blocks = prepared.student_blocks
    teachers = [_model_facts(lm) for lm in prepared.teacher.lms]
    others = teachers[1:]
    return {
        "teacher": teachers[0] if teachers else None,
        **({"beside": others} if others else {}),
        "student": _model_facts(prepared.student),
        "data": {
            "sample_rows": sample_rows(blocks, prepared.student.tokenizer),
            "name": train_set.name,
            "documents": len(train_set),
            "train_tokens": int(blocks.counts.sum()),
            "eval_tokens": int(prepared.eval_blocks.counts.sum()),
            "validation_tokens": int(prepared.validation_blocks.counts.sum()),
            "validated_apart": not torch.equal(
                prepared.validation_blocks.ids, prepared.eval_blocks.ids
            ),
            "turns": describe_turns(blocks.turns),
            "shares": [str(share) for share in (*train_set.shares, *blocks.shares)],
            "left_out": first_few([*train_set.left_out, *blocks.left_out]),
        },
        "resolved": {
            "LEARNING_RATE": settings.peak_lr,
            "DIVERGENCE": settings.kind_of_divergence,
            "ROUTER_MODE": settings.router_mode,
        },
    }


def write_left_out(prepared: Prepared, path: Path) -> None:
    """Write a line for each record and document that is left out, shortened or split, if any is."""
    messages = [*prepared.train_set.left_out, *prepared.student_blocks.left_out]
    if messages:
        atomic_write_text(path, "".join(f"{printable(message)}\n" for message in messages))


def _model_facts(lm: CausalLM) -> dict[str, Any]:
    if lm.model is None:
        return {"name": lm.name}
    config, parameters = lm.model.config.get_text_config(), list(lm.model.parameters())
    return {
        "name": lm.name,
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "vocabulary": config.vocab_size,
        "layers": config.num_hidden_layers,
    }


def card_facts(prepared: Prepared, distiller: Distiller, events: int) -> dict[str, str]:
    """Return what the student's model card says about its origin, without local folders."""
    settings = prepared.settings
    data = prepared.train_set
    defaults = LanguageSettings().to_dict()
    teachers = [
        (without_folders(t.name), t.weights_id.split()[0][:16]) for t in prepared.teacher.lms
    ]
    values = {n: v for n, v in settings.to_dict().items() if v != defaults[n]}
    flags = [
        f"--{n.lower()}={_as_flag(n, v)}"
        for n, v in values.items()
        if n not in _OF_THE_MACHINE and not n.endswith("_URL")
    ]
    steps, used = f"{distiller.guard.steps:,} steps", distiller.learned.items()
    return {
        "teacher": ", ".join(f"{name} ({weights})" for name, weights in teachers)
        or settings.teacher_model,
        "loss": f"{settings.alpha_ce:g} * cross-entropy + {settings.alpha_kd:g} * T^2 *"
        f" {settings.kind_of_divergence}, T = {settings.temperature:g}",
        "data": without_folders(settings.data_path),
        "documents": f"{len(data):,} (SHA-256 {data.digest[:16]})",
        "guard": ", ".join([f"{events} events", steps, *(f"{n:,} with {t}" for t, n in used)]),
        "command": f"`{shlex.join(['ssl_kd', 'distill', *flags])}`",
        "versions": ", ".join(f"{n} {v}" for n, v in versions().items()),
    }


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return value if name == "TEACHER_PROMPT_TEMPLATE" else without_folders(str(value))


def metrics_facts(prepared: Prepared, distiller: Distiller) -> dict[str, Any]:
    """Return the facts about the training for `metrics.json`."""
    blocks = prepared.blocks
    return {
        "tokens": distiller.tokens,
        "success_rate": distiller.success.rate,
        "success_rates": distiller.success.rates,
        "learned_from": distiller.learned,
        "cache": prepared.teacher.facts(),
        "alignment": blocks.statistics() if isinstance(blocks, AlignedBlocks) else None,
    }


def log_summary(prepared: Prepared, steps: int) -> None:
    """Log what is trained, on what and how, in six lines; a dry run also shows its first rows."""
    for line in _summary(prepared, steps):
        logger.info("%s", line)
    if prepared.settings.dry_run:
        logger.info("the first rows, with the parts that have loss in [[ and ]]:")
        for number, row in enumerate(
            sample_rows(prepared.student_blocks, prepared.student.tokenizer), 1
        ):
            logger.info("row %d, %s", number, describe_row(row))


def _summary(prepared: Prepared, steps: int) -> list[str]:
    settings, blocks = prepared.settings, prepared.student_blocks
    student = _model_facts(prepared.student)
    n_warmup = warmup_length(
        steps, settings.warmup_fraction, settings.lr_schedule, settings.warmup_steps
    )
    batches = settings.gradient_accumulation_steps
    accumulated = f" in {batches} batches" if batches > 1 else ""
    return [
        f"teacher: {prepared.teacher.describe()}",
        f"student: {student['name']}, {student['trained']:,} of {student['parameters']:,} weights "
        "trained",
        f"text: {len(blocks):,} rows of {settings.block_size} tokens, "
        f"{int(blocks.counts.sum()):,} tokens with loss; {len(prepared.eval_blocks):,} rows held "
        "out for the scores",
        f"steps: {steps:,} of {settings.batch_size * batches} rows{accumulated}; learning rate "
        f"{settings.peak_lr:g}, warm-up of {n_warmup} steps, then {settings.lr_schedule}",
        f"loss: {settings.alpha_ce:g} ce + {settings.alpha_kd:g} kd "
        f"({settings.kind_of_divergence}), temperature {settings.temperature:g} (the divergence is "
        f"multiplied by its square, {settings.temperature**2:g})",
        f"logits: {_logits_line(prepared)}; {prepared.precision}",
    ]


def _logits_line(prepared: Prepared) -> str:
    """Return the shapes of the logits of a batch."""
    settings, models = prepared.settings, {"student": prepared.student.model}
    for teacher in prepared.teacher.frozen[:1]:
        models["teacher"] = teacher.model
    rows = f"{settings.batch_size}, {settings.block_size}"
    heads = {name: without_adapters(lm).get_output_embeddings() for name, lm in models.items()}
    return ", ".join(f"{name} [{rows}, {len(head.weight)}]" for name, head in heads.items())


def log_step(step: int, result: StudentStep) -> None:
    """Log the loss terms of a step if it is one of the first FIRST_STEPS."""
    if step < FIRST_STEPS:
        terms = ", ".join(f"{name} {value:.4f}" for name, value in result.terms.items())
        terms += f", combined loss {result.loss:.4f}"
        logger.info("step %d: %s, gradient norm %.3g", step + 1, terms, result.grad_norm)


def log_training_outcome(distiller: Distiller, best_step: int) -> None:
    """Warn if training did not improve the student, or if a term was left out of some steps."""
    if best_step == 0:
        logger.warning(
            "training did not improve the score on held-out text: the saved student has its initial"
            " weights. Try another --learning_rate, more --max_steps or more text"
        )
    for name, rate in distiller.success.rates.items():
        if rate < 1:
            logger.warning(
                "the loss term %s was used in %d of %d steps, on %.1f %% of its tokens; "
                "events.jsonl says why",
                name,
                distiller.learned[name],
                distiller.guard.steps,
                100 * rate,
            )
    if skipped := _above_threshold(distiller):
        logger.warning("%s", skipped)


def stop_message(error: TooFewHealthyParts, distiller: Distiller) -> str:
    """Return the message of a stopped run: the error, its causes, and settings to try."""
    events = distiller.guard.events
    causes = [event for event in events.events if event.action == "explained"]
    once = {e.reason: f"{e.part}, step {e.step}: {e.reason}" for e in reversed(causes)}
    lines = [str(error), *reversed(once.values())]
    if flags := advice(distiller):
        lines.append(flags)
    if bundles := distiller.explainer.bundles():
        command = f"ssl_kd replay {shlex.quote(str(bundles[0]))}"
        lines.append(f"{command} runs the step of the first fault again")
    return "\n".join(lines)


def _above_threshold(distiller: Distiller) -> str:
    """Return which norms GRAD_NORM_THRESHOLD skipped, if it skipped the last steps; else ""."""
    events = [e for e in distiller.guard.events.events if e.action == SKIPPED]
    norms = [e.value for e in events if e.stage == Stage.LARGE.name.lower() and e.value]
    threshold = distiller.settings.grad_norm_threshold
    if threshold is None or not norms or events[-1].stage != Stage.LARGE.name.lower():
        return ""
    return (
        f"GRAD_NORM_THRESHOLD is {threshold:g}, and the gradient norms of the {len(norms)} steps"
        f" that it skipped were {min(norms):.3g} to {max(norms):.3g}: leave it out"
        f" (--grad_norm_threshold None; then SPIKE_FACTOR, relative to the usual norm, decides), or"
        f" raise it above {max(norms):.3g}"
    )


def advice(distiller: Distiller) -> str:
    """Return a line with flags to try after a stopped run, or an empty text.

    If GRAD_NORM_THRESHOLD skipped the last steps, the line is about it. Otherwise, the flags come
    from the diagnoses; without a diagnosis, they are ones that stabilize any training.
    """
    settings = distiller.settings
    if too_large := _above_threshold(distiller):
        return too_large
    diagnoses = [d for d in distiller.explainer.diagnoses if d.cause != Cause.UNKNOWN]
    values: dict[str, Any] = {c.setting: c.value for d in diagnoses for c in d.advice}
    if not diagnoses:
        values = {"learning_rate": min(settings.peak_lr / 5, settings.usual_lr)}
        if settings.clip_grad is None or settings.clip_grad > 0.5:
            values["clip_grad"] = 0.5
        if settings.grad_norm_threshold is not None:  # of steps before this process resumed
            values["grad_norm_threshold"] = None
        if distiller.teacher.compares == "tokens" and settings.temperature < 2:
            values["temperature"] = 2.0
        if distiller.precision.student != torch.float32:
            values["model_dtype"] = "float32"
    flags = [f"--{n} {v:.2g}" if isinstance(v, float) else f"--{n} {v}" for n, v in values.items()]
    return f"Settings to try: {' '.join(flags)}" if flags else ""
