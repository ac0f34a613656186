"""The recipes of the language mode: settings of publications, a few lines of data each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ssl_kd.core.settings.recipes import Paper, Recipe

_GKD_PAPER = Paper(
    "Agarwal et al.",
    "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
    2023,
    "2306.13649",
)
_MOE_PAPER = Paper(
    "Kim, Chu, Yang",
    "Every Expert Matters: Towards Effective Knowledge Distillation for Mixture-of-Experts"
    " Language Models",
    2025,
    "2502.12947",
)
_DISTILLM_PAPER = Paper(
    "Ko, Kim, Chen, Yun",
    "DistiLLM: Towards Streamlined Distillation for Large Language Models",
    2024,
    "2402.03898",
)
_DOLLY = "hf:MiniLLM/dolly"
_MEAN = "mean over Dolly, SelfInst, Vicuna, S-NI and UnNI and five seeds,"
# The setup of Kim et al. (2025), section 5.1 and appendix A: the student continues every prompt,
# and learns by reverse KL alone.
_MOE: Mapping[str, Any] = {
    "data_path": _DOLLY,
    "block_size": 512,
    "divergence": "reverse_kl",
    "temperature": 1.0,
    "alpha_kd": 1.0,
    "alpha_ce": 0.0,
    "on_policy": 1.0,
    "rollout_temperature": 1.0,
    "max_new_tokens": 256,
    "learning_rate": 1e-5,
    "batch_size": 16,
    "epochs": 10.0,
    "optim": "adamw_torch",
}
_MOE_SOURCE = "arXiv 2502.12947, section 5.1 and appendix A"
_OF_DOLLY = "fine-tuned on the same data before"
_STUDENT = f"the student, {_OF_DOLLY}; the paper's is princeton-nlp/Sheared-LLaMA-1.3B"
_NO_ROUGE = (
    "ROUGE-L is not computed here, and the four other test sets are not read: the report has"
    " perplexity and agreement with the teacher. The paper takes the checkpoint with the best"
    " ROUGE-L on validation data, this library the last one."
)
_UNSTATED = (
    "The paper does not state schedule, warm-up, weight decay and clipping: they are the defaults"
    " of this library."
)
_NOT_RUN = "Not run here: neither the models nor the data were available."
_LLAMA_MOE = (
    "The paper's teachers are Llama-MoE models with noisy gates, which are not among the"
    " mixtures that this library supports: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE."
)


def _moe(mode: str, average: str, differs: tuple[str, ...] = (), **values: Any) -> Recipe:
    return Recipe(
        "distill",
        _MOE_PAPER,
        {**_MOE, "router_mode": mode, **values},
        f"{average} ROUGE-L",
        f"Table 1, {_MEAN} from Llama-MoE-3.5B (4/16) to Sheared-LLaMA-1.3B",
        _MOE_SOURCE,
        (*differs, _LLAMA_MOE, _NO_ROUGE, _UNSTATED, _NOT_RUN),
        needs={"teacher_model": f"a mixture of experts, {_OF_DOLLY}", "student_model": _STUDENT},
    )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "gkd": Recipe(
            "distill",
            _GKD_PAPER,
            _MOE,
            "24.89 ROUGE-L",
            "not by the authors of GKD, but by Kim et al., 2025, arXiv 2502.12947, Table 1,"
            f" {_MEAN} from Sheared-LLaMA-2.7B to 1.3B",
            f"{_MOE_SOURCE}, which runs GKD with reverse KL on the student's text alone",
            (
                "The experiments of the GKD paper itself are on T5, which has an encoder; this"
                " library distills decoders.",
                _NO_ROUGE,
                _UNSTATED,
                _NOT_RUN,
            ),
            needs={
                "teacher_model": f"the teacher, {_OF_DOLLY}; theirs is Sheared-LLaMA-2.7B",
                "student_model": _STUDENT,
            },
        ),
        "gkd-trl": Recipe(
            "distill",
            _GKD_PAPER,
            {
                "divergence": "js:0.5",
                "temperature": 1.0,
                "alpha_kd": 1.0,
                "alpha_ce": 0.0,
                "on_policy": 0.5,
                "rollout_temperature": 0.9,
                "max_new_tokens": 128,
                "block_size": 1024,
                "learning_rate": 2e-5,
            },
            "not stated",
            "these are the defaults of a trainer",
            "huggingface/trl, GKDConfig (lmbda, beta, temperature, max_new_tokens) and SFTConfig"
            " (max_length, learning_rate)",
            (
                "TRL draws once for each batch whether the student generates it; here it is a share"
                " of the rows of each batch.",
                "Batch size, epochs and schedule are those of this library: set them for your"
                " data.",
                "Not compared with a run of TRL's GKDTrainer.",
            ),
            needs={
                "teacher_model": "the teacher's folder or Hub name",
                "student_model": "the student's folder or Hub name, with the same tokenizer",
                "data_path": "your chats or prompts with completions",
            },
        ),
        "moekd-all": _moe("all", "25.32"),
        "moekd-ka": _moe(
            "ka",
            "25.71",
            (
                "The paper updates the student after each of its M = 2 passes of the teacher; here"
                " a step takes the mean of both passes.",
            ),
        ),
        "moekd-sar": _moe(
            "sar",
            "25.91",
            (
                "A router that moves more than 0.5 nats (KL of the gates) from the original stops"
                " learning here; the paper has no such limit.",
            ),
            router_lr=1e-5,
        ),
        "distillm": Recipe(
            "distill",
            _DISTILLM_PAPER,
            {
                "teacher_model": "MiniLLM/teacher-gpt2-1.5B",
                "student_model": "MiniLLM/init-gpt2-120M",
                "data_path": _DOLLY,
                "block_size": 512,
                "divergence": "skew_kl",
                "temperature": 1.0,
                "alpha_kd": 1.0,
                "alpha_ce": 0.0,
                "packing": False,
                "learning_rate": 5e-4,
                "lr_schedule": "cosine",
                "warmup_fraction": 0.0,
                "weight_decay": 0.01,
                "clip_grad": 1.0,
                "batch_size": 128,
                "epochs": 20.0,
                "seed": 10,
            },
            "not stated",
            "the official repository shows its results as a picture",
            "jongwooko/distillm, scripts/gpt2/distillm/train_0.1B_1.5B.sh (8 rows on each of 16"
            " processes); models of the MiniLLM collection, which that script builds on",
            (
                "The adaptive share of the student's text and its replay buffer are not here: this"
                " recipe is the skew KL on the data alone (add --on_policy 0.5 for a fixed share).",
                "The script adds the cross-entropy on OpenWebText, which is left out.",
                "Teacher and student of the script are fine-tuned by its authors; these are those"
                " of MiniLLM, of the same sizes and data.",
                _NOT_RUN,
            ),
        ),
    }
)
