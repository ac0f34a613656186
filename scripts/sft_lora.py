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


def positive_int(text: str) -> int:
    """Parse a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def tolerance(text: str) -> float:
    """Parse a finite number, at least 0."""
    try:
        if 0 <= (value := float(text)) < float("inf"):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a finite number, at least 0, got {text!r}")


def training_settings(args: argparse.Namespace, flags: list[str]) -> LanguageSettings:
    """Return the settings of a run that trains adapters by cross-entropy with the answers."""
    values = {**SFT, "student_model": args.model, "data_path": args.data_path}
    return read_settings(
        LanguageSettings,
        flags,
        CONFIG,
        prog=f"{sys.argv[0]} train",
        presets={"sft": values},
        preset="sft",
    )


def chosen_split(args: argparse.Namespace) -> tuple[Literal["all", "test"], str]:
    """Return the split of the data to test on, and its description.

    Without --split it is all of the data, or only the part that the model's run held out if it was
    trained on the rest, according to the run's folder.
    """
    if args.split is not None:
        return args.split, "all of the data" if args.split == "all" else "its held-out part"
    config = Path(args.model).parent / "config.json"  # of runs/NAME/student
    run = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    trained_on = run.get("settings", {})
    if "DATA_PATH" not in trained_on:
        return "all", "all of the data; whether the model was trained on it is not known"
    if Path(trained_on["DATA_PATH"]).resolve() != Path(args.data_path).resolve():
        return "all", "all of the data, which is not what this model's run was trained on"
    if trained_on.get("EVAL_PATH") is not None:
        return "all", "all of the data, ALL OF WHICH THIS MODEL'S RUN WAS TRAINED ON"
    return "test", "the part of the data that this model's run held out; --split all takes all"


def check_files(args: argparse.Namespace, split: Literal["all", "test"]) -> Any:
    """Check the files before the model is loaded; return the questions and the device."""
    from ssl_kd.core.precision import Precision
    from ssl_kd.language.evaluate.judge import has_questions
    from ssl_kd.language.models.causal import outline_causal_lm
    from ssl_kd.language.text.dataset import open_text
    from ssl_kd.language.text.rows import check_vocabulary

    faults, device, questions, lm = Faults(), None, None, None
    with faults.of("--device"):
        device = Precision.for_device(args.device).device
    with faults.of("--data-path"):
        questions = open_text(args.data_path, split)
    with faults.of("--model"):
        lm = outline_causal_lm(args.model)
        if lm.model is not None:
            check_vocabulary(lm)
    if questions is not None and lm is not None:
        with faults.of("--data-path"):
            if not has_questions(questions.examples, lm.tokenizer):
                raise SettingsError(
                    f"{args.data_path} has no question whose answer is known: expected lines with"
                    " prompt and completion (or question and answer), the second with"
                    " <answer>...</answer>."
                )
    faults.raise_all("no model was loaded")
    return questions, device


def test(args: argparse.Namespace) -> int:
    """Answer the questions by greedy decoding, and print how many answers are right."""
    check_installed(["transformers"], "llm")
    import torch

    from ssl_kd.core.runs.ranks import refuse_ranks
    from ssl_kd.language.evaluate.judge import judge_answers
    from ssl_kd.language.models.causal import load_causal_lm
    from ssl_kd.language.models.frozen import FrozenTeacher

    refuse_ranks()
    split, description = chosen_split(args)
    questions, device = check_files(args, split)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    lm = load_causal_lm(args.model)  # adapters are merged into their base, in float32
    scores, _ = judge_answers(
        FrozenTeacher(lm.model, device=device, dtype=dtype).model,
        lm.tokenizer,
        questions.examples,
        limit=args.limit,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        last_number=args.last_number,
        tolerance=args.tolerance,
    )
    assert scores.interval is not None  # there are questions
    low, high = scores.interval
    print(
        f"accuracy {scores.accuracy:.1%} ({scores.right} of {scores.n} questions; 95 % interval "
        f"{low:.1%} to {high:.1%}), numbers equal within {args.tolerance:g} of their size\n"
        f"answer rate {scores.answer_rate:.1%} ({scores.answered} of {scores.n} name an answer)\n"
        f"questions: {description}\n"
        f"computed in {str(dtype).removeprefix('torch.')} on {device}"
    )
    return 0


def main(words: list[str]) -> int:
    """Run the command named by the first argument."""
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
    testing.add_argument(
        "--limit", type=positive_int, help="number of questions at most; default: all"
    )
    testing.add_argument("--batch-size", type=positive_int, default=8, help="questions per batch")
    testing.add_argument(
        "--max-new-tokens", type=positive_int, default=256, help="of an answer, at most"
    )
    testing.add_argument("--tolerance", type=tolerance, default=1e-4, help="relative, of numbers")
    testing.add_argument(
        "--last-number", action="store_true", help="the last number counts where no answer is named"
    )
    testing.add_argument("--device", default="auto")

    def work() -> int:
        args, flags = parser.parse_known_args(words)
        if args.job == "train":
            return distill_as(
                lambda: training_settings(args, flags), [*program(sys.argv[0]), *words]
            )
        if flags:
            known = ", ".join(f"--{name}" for name in vars(args) if name != "job")
            raise SettingsError(f"There is no flag {flags[0]} of test, which takes {known}.")
        return test(args)

    return guarded(work, memory=LANGUAGE_MEMORY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
