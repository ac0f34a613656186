"""The settings of a teacher: which one, where it answers, and what is kept of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssl_kd.settings import Settings, setting


@dataclass(frozen=True)
class TeacherSettings(Settings):
    """Which teacher answers, where, and what a cache keeps of its answers."""

    teacher_model: str = setting(
        "train",
        "folder written by save_pretrained, or name on the Hugging Face Hub | train (a small one is"
        " trained on the data first) | none (no teacher: cross-entropy alone)",
        "Several with the same tokenizer, separated by commas: the mean of their divergences.",
        section="Teacher",
    )
    teacher_weights: str | None = setting(
        None,
        'weights of several teachers in that mean, such as "0.7,0.3", made to sum to 1; None: all'
        " alike",
    )
    teacher_cache: str | None = setting(
        None,
        "folder that scripts/cache_teacher.py wrote; None: the teacher runs live",
        "With a cache, the teacher takes no memory in training.",
    )
    teacher_url: str | None = setting(
        None,
        "a server that answers for the teacher, such as http://host:8000/v1 of vLLM; None: it runs"
        " here",
        "TEACHER_MODEL is then where its tokenizer is. A key is taken from the environment variable"
        " TEACHER_API_KEY.",
    )
    teacher_served_as: str | None = setting(
        None, "name that the server knows the teacher by; None: TEACHER_MODEL"
    )
    teacher_top_k: int = setting(
        20,
        "likeliest tokens that a server is asked for at each position, and that a cache of its"
        " answers keeps (as topk)",
        "vLLM gives as many as its --max-logprobs, by default 20.",
        low=1,
        high=65_535,
    )
    cache_method: str = setting(
        "sample",
        "what cache_teacher.py keeps: sample (tokens drawn from the teacher: unbiased, for"
        " forward_kl) | topk (its likeliest tokens and the mass of the rest: for every divergence)"
        " | hidden (what its output head gets, and the head once: exact, for every divergence and"
        " temperature)",
        choices=("sample", "topk", "hidden"),
    )
    cache_k: int = setting(
        128,
        "tokens kept at each position of a cache of CACHE_METHOD sample or topk",
        "More: closer to the teacher, and a proportionally larger cache.",
        low=1,
        high=65_535,
    )
    teacher_quantization: str | None = setting(
        None,
        "keep the linear layers of a frozen teacher in fewer bits, by bitsandbytes: nf4 (4 bits);"
        " None: in MODEL_DTYPE",
        "For a GPU's memory: on a CPU neither time nor memory is saved.",
        choices=("nf4",),
    )
    trust_remote_code: bool = setting(
        False, "run Python files that come with a model, where it needs them; read them first"
    )
    teacher_offload: bool = setting(
        False, "keep the teacher in the host's memory between forward passes"
    )
    force_recompute: bool = setting(
        False, "ask the teacher about everything anew, whatever TEACHER_CACHE holds"
    )
    rebuild_damaged: bool = setting(False, "write the damaged files of a teacher's cache again")
    teacher_steps: int = setting(
        800, "training steps of a teacher that is trained here (TEACHER_MODEL train)", low=1
    )
    teacher_size: str = setting(
        "4x192", "LAYERSxDIM of a teacher that is trained here", forms=(("LAYERSxDIM", r"\d+x\d+"),)
    )

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Those of TEACHER_MODEL: a folder's own name may have commas in it."""
        name = self.teacher_model
        if self.teacher_url is not None or "," not in name or Path(name).expanduser().is_dir():
            return (name,)
        return tuple(part.strip() for part in name.split(","))

    @property
    def teacher_shares(self) -> tuple[float, ...] | None:
        """TEACHER_WEIGHTS as numbers; None where they are all alike."""
        given = self.teacher_weights
        return None if given is None else tuple(map(float, given.split(",")))
