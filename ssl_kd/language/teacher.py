"""The teacher that the settings name: at work, or first trained on the text."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from pathlib import Path

from ssl_kd.datasets.blocks import isolates_documents, make_blocks
from ssl_kd.datasets.new_tokenizer import train_tokenizer
from ssl_kd.datasets.text import TextDataset
from ssl_kd.errors import InputError, UserError
from ssl_kd.files import sha256_file
from ssl_kd.guard.precision import Precision
from ssl_kd.language.parallel import check_ranks, shard_teacher
from ssl_kd.language.presets import TEXT_ALONE
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import Distiller, StudentStep
from ssl_kd.language.train import train
from ssl_kd.ranks import Ranks
from ssl_kd.settings import SettingsError
from ssl_kd.store.teacher_cache import TeacherCache
from ssl_kd.teachers.causal import CausalLM, load_causal_lm, load_tokenizer
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.teachers.quantization import Quantization
from ssl_kd.teachers.student import build_student, save_student
from ssl_kd.training.clock import Progress

logger = logging.getLogger(__name__)

TEACHERS = Path("data") / "teachers"
TEACHER_LR = 2e-3  # of a small teacher that is trained here
VOCABULARY = 1024  # of a tokenizer that is trained here
ALONE = Ranks(0, 1, "cpu")


def load_teacher(
    settings: LanguageSettings, name: str, precision: Precision, *, as_saved: bool = False
) -> CausalLM:
    """The teacher's model as the settings would have it loaded; `as_saved`: in its file's dtype."""
    kind, dtype = settings.teacher_quantization, precision.teacher
    return load_causal_lm(
        name,
        dtype=None if as_saved else dtype,
        remote_code=settings.trust_remote_code,
        quantization=Quantization.of(kind, precision.device, dtype),
    )


def absent_teacher(settings: LanguageSettings, name: str, why: UserError | OSError) -> CausalLM:
    """What stands for a teacher that cannot be loaded where its cache can be learned from.

    Its weights are those that the cache says; its tokenizer is its own where that can be read, and
    None where not.

    Raises:
        UserError, OSError: `why`, where there is no cache, or none of the teacher as it came.
        SettingsError: the student is made of the teacher's own layers or architecture.
    """
    folder = Path(str(settings.teacher_cache))
    if settings.teacher_cache is None or not folder.is_dir() or is_routed(settings):
        raise why
    weights = TeacherCache.open(folder, verify=False).fingerprint.weights
    if " " in weights:  # with the experts that answered
        raise why
    spec = settings.student_model
    if spec.startswith(("layers:", "fresh:")):
        raise SettingsError(
            f"STUDENT_MODEL {spec!r} is made of the teacher {name}, which cannot be loaded: take "
            f"llama:LAYERSxDIM, or a model of its tokenizer. ({why})"
        ) from why
    logger.warning(
        "the teacher %s cannot be loaded, so the student learns from TEACHER_CACHE alone and the "
        "table has no row of the teacher (%s)",
        name,
        why,
    )
    try:
        tokenizer = load_tokenizer(name, remote_code=settings.trust_remote_code)
    except InputError:
        tokenizer = None
    return CausalLM(None, tokenizer, name, weights)


def at_work(
    settings: LanguageSettings, precision: Precision, teacher: CausalLM, ranks: Ranks
) -> FrozenTeacher:
    """The teacher on its device; with SHARD a piece of it on each rank's."""
    device, offload = precision.device, settings.teacher_offload
    if not settings.shard:
        return FrozenTeacher(teacher.model, device=device, dtype=precision.teacher, offload=offload)
    frozen = FrozenTeacher(teacher.model, dtype=precision.teacher)
    shard_teacher(frozen, device, ranks.world)
    return frozen


def is_routed(settings: LanguageSettings) -> bool:
    """Whether the teacher's experts are others than as it came."""
    return settings.router_mode != "native" or settings.router_weights is not None


def router_id(settings: LanguageSettings) -> str:
    """Identity of ROUTER_WEIGHTS; empty where there are none."""
    if settings.router_weights is None:
        return ""
    file = Path(settings.router_weights)
    if not file.is_file():
        raise SettingsError(f"ROUTER_WEIGHTS: there is no router file {file}.")
    return sha256_file(file)[:16]


def trained_teacher(
    settings: LanguageSettings,
    texts: TextDataset,
    precision: Precision,
    tell: Progress,
    ranks: Ranks = ALONE,
) -> Path:
    """A small teacher trained on the text by cross-entropy; found again where it was before.

    Several ranks train it together.

    Returns:
        Its folder, below `data/teachers`.
    """
    own = settings.replace(
        teacher_model="none",
        teacher_cache=None,
        student_model=f"fresh:{settings.teacher_size}",
        max_steps=settings.teacher_steps,
        epochs=None,
        **TEXT_ALONE,
        loss_mean="tokens",
        learning_rate=TEACHER_LR,
        lr_schedule="cosine",
        clip_grad=1.0,
        teacher_quantization=None,
        lora_rank=0,
        lora_quantization=None,
        shard=False,
        teacher_text=0.0,
    )
    decides = ("block_size", "packing", "batch_size", "gradient_accumulation_steps")
    decides += ("teacher_size", "teacher_steps", "seed")
    decides += ("weight_decay", "warmup_fraction")
    said = [texts.digest, str(precision.student), *(str(getattr(own, name)) for name in decides)]
    folder = TEACHERS / hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
    if ranks.from_first(folder.exists):
        logger.info("using the teacher trained earlier on this text: %s", folder)
        return folder
    check_ranks(own, ranks)
    tokenizer = train_tokenizer(texts, VOCABULARY)
    teacher = build_student(own.student_model, None, tokenizer, seed=settings.seed)
    packing = settings.packing and isolates_documents(teacher.model)
    blocks = make_blocks(texts, tokenizer, settings.block_size, packing=packing)
    distiller = Distiller(teacher.model, own, precision)

    def on_step(step: int, result: StudentStep) -> None:
        tell("teacher", step + 1, own.max_steps, {"ce": result.ce})

    train(distiller, blocks, own.max_steps, on_step=on_step)
    card = f"Trained on {texts.name} for {own.max_steps} steps, to be distilled from."
    ranks.from_first(partial(save_student, teacher.model, tokenizer, folder, card))
    return folder
