"""Load the teacher of a run or train one, and place it on its device."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ssl_kd.core.errors import brief
from ssl_kd.core.files import sha256_file
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import Progress
from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.models.causal import CausalLM, load_causal_lm
from ssl_kd.language.models.dtypes import nf4
from ssl_kd.language.models.student import build_student, save_student
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.groups import TeacherSettings
from ssl_kd.language.text.blocks import isolates_documents, make_blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.train.loop import train
from ssl_kd.language.train.step import Distiller, StudentStep, check_ranks

logger = logging.getLogger(__name__)

ONE_RANK = Ranks(0, 1, "cpu")
TEACHERS = Path("data") / "teachers"
VOCABULARY = 1024  # tokens of a tokenizer that is trained by a run


@dataclass(frozen=True)
class InMemoryModels:
    """Models that the caller passes in memory instead of naming them in the settings."""

    teacher: CausalLM | None = None
    student: CausalLM | None = None


NO_MODELS = InMemoryModels()


def load_teacher(
    teacher: TeacherSettings, name: str, precision: Precision, *, as_saved: bool = False
) -> CausalLM:
    """Load a teacher's model in the precision of the run, or `as_saved` in its file's dtype."""
    dtype = precision.teacher
    lm = load_causal_lm(
        name,
        dtype=None if as_saved else dtype,
        remote_code=teacher.trust_remote_code,
        quantization=nf4(precision.device, dtype) if teacher.quantization else None,
    )
    set_attention(lm, teacher.attn_implementation)
    return lm


def set_attention(lm: CausalLM, implementation: str) -> None:
    """Set the attention of a model to ATTN_IMPLEMENTATION, in place; `auto` changes nothing."""
    if implementation == "auto" or lm.model is None:
        return
    try:
        lm.model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f"ATTN_IMPLEMENTATION is {implementation!r}, which {lm.name} cannot use here "
            f"({brief(error)}): set it to 'auto', 'sdpa' or 'eager'"
        ) from error


def router_id(weights: str | None) -> str:
    """Return a digest of the file in ROUTER_WEIGHTS; empty for None."""
    if weights is None:
        return ""
    file = Path(weights)
    if not file.is_file():
        raise SettingsError(
            f"ROUTER_WEIGHTS is {weights!r}, but there is no router file {file}: name the "
            "router.safetensors of a run, or set ROUTER_WEIGHTS to None"
        )
    return sha256_file(file)[:16]


def trained_teacher(
    settings: LanguageSettings,
    texts: TextDataset,
    precision: Precision,
    progress: Progress,
    ranks: Ranks = ONE_RANK,
) -> Path:
    """Train a small teacher by cross-entropy for TEACHER_MODEL `train`; return its folder.

    A teacher that was trained earlier on the same text with the same settings is used again.
    """
    assert settings.to_train is not None
    size, steps = settings.to_train
    kept = "device model_dtype seed block_size packing batch_size gradient_accumulation_steps"
    kept += " weight_decay warmup_fraction gradient_checkpointing log_every"
    small = LanguageSettings(
        teacher_model="none",
        student_model=f"fresh:{size}",
        max_steps=steps,
        alpha_ce=1.0,
        alpha_kd=0.0,
        learning_rate=2e-3,
        **{name: getattr(settings, name) for name in kept.split()},
    )
    key = [texts.digest, precision.student, small.block_size, small.packing, small.batch_size]
    key += [small.gradient_accumulation_steps, size, steps, small.seed, small.weight_decay]
    key += [small.warmup_fraction]
    folder = TEACHERS / hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:16]
    if ranks.from_first(folder.exists):
        logger.info("using the teacher trained earlier on this text: %s", folder)
        return folder
    check_ranks(ranks, small.batch_size)
    tokenizer = train_tokenizer(texts, VOCABULARY)
    model = build_student(small.student_model, None, tokenizer, seed=settings.seed).model
    packing = settings.packing and isolates_documents(model)
    blocks = make_blocks(texts, tokenizer, settings.block_size, packing=packing)

    def on_step(step: int, result: StudentStep) -> None:
        progress("teacher", step + 1, steps, {"ce": result.ce})

    train(Distiller(model, small, precision), blocks, steps, on_step=on_step)
    card = f"Trained on {texts.name} for {steps} steps, to be distilled from."
    ranks.from_first(partial(save_student, model, tokenizer, folder, card))
    return folder
