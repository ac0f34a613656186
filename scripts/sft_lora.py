"""Fine-tune a language model by LoRA on questions with <answer>...</answer> targets, and test it.

python scripts/sft_lora.py train --model FOLDER --data_path train.jsonl
python scripts/sft_lora.py test --model runs/latest/student --data_path test.jsonl
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal

from ssl_kd.cli import LANGUAGE_MEMORY, distill_as, guarded, program
from ssl_kd.cli.flags import FlagParser, read_settings
from ssl_kd.core.errors import Faults
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.language.settings import LanguageSettings

CONFIG = Path(__file__).with_name("config.py")
SFT = {
    "teacher_model": "none",
    "alpha_kd": 0.0,
    "alpha_ce": 1.0,
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "learning_rate": 2e-4,
    "epochs": 3.0,
    "batch_size": 32,
    "lr_schedule": "linear",
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "gradient_checkpointing": True,
    "model_dtype": "float32",
    "report_to": "tensorboard",
    "packing": False,  # a question a row
    "block_size": 512,
    "max_new_tokens": 256,
}


def whole(word: str) -> int:
    """A whole number from 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} came, expected a whole number from 1")
    return int(word)


def distance(word: str) -> float:
    """A finite number from 0."""
    try:
        if 0 <= (value := float(word)) < float("inf"):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{word!r} came, expected a finite number from 0")


def train(given: argparse.Namespace, others: list[str]) -> LanguageSettings:
    """The settings of a run that trains adapters by cross-entropy with the answers."""
    values = {**SFT, "student_model": given.model, "data_path": given.data_path}
    return read_settings(
        LanguageSettings,
        others,
        CONFIG,
        prog=f"{sys.argv[0]} train",
        presets={"sft": values},
        preset="sft",
    )


def asked_split(given: argparse.Namespace) -> tuple[Literal["all", "test"], str]:
    """Which questions of the data are asked, and in words.

    Without --split all of them, or only those that the model's run held out where it was trained on
    the others; that is read from the run's folder.
    """
    if given.split is not None:
        return given.split, "all of the data" if given.split == "all" else "its held-out part"
    config = Path(given.model).parent / "config.json"  # of runs/NAME/student
    run = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    learned = run.get("settings", {})
    if "DATA_PATH" not in learned:
        return "all", "all of the data; whether the model was trained on it is not known"
    if Path(learned["DATA_PATH"]).resolve() != Path(given.data_path).resolve():
        return "all", "all of the data, which is not what this model's run was trained on"
    if learned.get("EVAL_PATH") is not None:
        return "all", "all of the data, ALL OF WHICH THIS MODEL'S RUN WAS TRAINED ON"
    return "test", "the part of the data that this model's run held out; --split all asks all"


def check_before_asking(given: argparse.Namespace, split: Literal["all", "test"]) -> Any:
    """Check what files tell, before the model is loaded; return the questions and the device."""
    from ssl_kd.core.precision import Precision
    from ssl_kd.language.evaluate.judge import has_questions
    from ssl_kd.language.models.causal import outline_causal_lm
    from ssl_kd.language.text.dataset import open_text
    from ssl_kd.language.text.rows import check_vocabulary

    faults, device, questions, lm = Faults(), None, None, None
    with faults.of("--device"):
        device = Precision.for_device(given.device).device
    with faults.of("--data-path"):
        questions = open_text(given.data_path, split)
    with faults.of("--model"):
        lm = outline_causal_lm(given.model)
        if lm.model is not None:
            check_vocabulary(lm)
    if questions is not None and lm is not None:
        with faults.of("--data-path"):
            if not has_questions(questions.examples, lm.tokenizer):
                raise SettingsError(
                    f"{given.data_path} has no question whose answer is known: expected lines with"
                    " prompt and completion (or question and answer), the second with"
                    " <answer>...</answer>."
                )
    faults.raise_all("no model was loaded")
    return questions, device


def test(given: argparse.Namespace) -> int:
    """Ask the questions, greedily, and print how many answers are right."""
    check_installed(["transformers"], "llm")
    import torch

    from ssl_kd.core.runs.ranks import refuse_ranks
    from ssl_kd.language.evaluate.judge import judge_answers
    from ssl_kd.language.models.causal import load_causal_lm
    from ssl_kd.language.models.frozen import FrozenTeacher

    refuse_ranks()
    split, which = asked_split(given)
    questions, device = check_before_asking(given, split)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    lm = load_causal_lm(given.model)  # adapters are merged into their base, in float32
    scores, _ = judge_answers(
        FrozenTeacher(lm.model, device=device, dtype=dtype).model,
        lm.tokenizer,
        questions.examples,
        limit=given.limit,
        batch_size=given.batch_size,
        max_new_tokens=given.max_new_tokens,
        last_number=given.last_number,
        tolerance=given.tolerance,
    )
    assert scores.interval is not None  # there are questions
    low, high = scores.interval
    print(
        f"accuracy {scores.accuracy:.1%} ({scores.right} of {scores.n} questions; 95 % interval "
        f"{low:.1%} to {high:.1%}), numbers equal within {given.tolerance:g} of their size\n"
        f"answer rate {scores.answer_rate:.1%} ({scores.answered} of {scores.n} name an answer)\n"
        f"asked: {which}\n"
        f"computed in {str(dtype).removeprefix('torch.')} on {device}"
    )
    return 0


def main(words: list[str]) -> int:
    """Do what the first word says."""
    parser = FlagParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="train takes every other setting of scripts/distill.py as a flag, too.",
        allow_abbrev=False,
    )
    jobs = parser.add_subparsers(dest="job", required=True)
    training = jobs.add_parser(
        "train",
        help="rate 2e-4, linear to 0, 3 epochs, 32 questions a step, norm 1, checkpointing",
        allow_abbrev=False,
    )
    testing = jobs.add_parser("test", help="accuracy and answer rate", allow_abbrev=False)
    for job in (training, testing):
        job.add_argument("--model", required=True, help="folder or name on the Hub")
        job.add_argument("--data-path", required=True, help="jsonl of questions and answers")
    testing.add_argument(
        "--split",
        choices=("all", "test"),
        help="of the data; default: test (held out) where the model was trained on the others",
    )
    testing.add_argument("--limit", type=whole, help="questions asked at most; default: all")
    testing.add_argument("--batch-size", type=whole, default=8, help="questions asked at once")
    testing.add_argument("--max-new-tokens", type=whole, default=256, help="of an answer, at most")
    testing.add_argument("--tolerance", type=distance, default=1e-4, help="relative, of numbers")
    testing.add_argument(
        "--last-number", action="store_true", help="the last number counts where no answer is named"
    )
    testing.add_argument("--device", default="auto")

    def work() -> int:
        given, others = parser.parse_known_args(words)
        if given.job == "train":
            return distill_as(lambda: train(given, others), [*program(sys.argv[0]), *words])
        if others:
            flags = ", ".join(f"--{name}" for name in vars(given) if name != "job")
            raise SettingsError(f"There is no flag {others[0]} of test, which takes {flags}.")
        return test(given)

    return guarded(work, memory=LANGUAGE_MEMORY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
