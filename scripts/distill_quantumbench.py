"""Distill a teacher into a student on one jsonl file, with the flags of older scripts.

python scripts/distill_quantumbench.py --teacher_model FOLDER --student_model_name gpt2 \
    --data_path questions.jsonl --epochs 3 --batch_size 2 --learning_rate 2e-5
"""

import sys
from pathlib import Path

from ssl_kd.cli import distill_as, program
from ssl_kd.cli.flags import FlagParser, read_settings
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.settings import LanguageSettings

CONFIG = Path(__file__).with_name("config.py")


def main(words: list[str]) -> int:
    """Read the flags and distill."""
    parser = FlagParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Defaults: --epochs 3 --batch_size 2 --learning_rate 2e-5 --temperature 3; "
        "every other setting of scripts/distill.py is a flag here, too, such as --align chunks, or "
        "--dry_run, which trains for five steps and shows the first rows of tokens.",
        allow_abbrev=False,
    )
    parser.add_argument("--teacher-model", required=True, help="folder or name on the Hub")
    parser.add_argument("--student-model-name", required=True, help="folder or name on the Hub")
    parser.add_argument("--data-path", required=True, help="a jsonl file")
    parser.add_argument("--alpha", type=float, default=0.5, help="teacher's share, default: 0.5")
    parser.add_argument("--fp16", action="store_true", help="half precision, on a GPU only")

    def read() -> LanguageSettings:
        args, flags = parser.parse_known_args(words)
        if not 0 <= args.alpha <= 1:
            raise SettingsError(f"--alpha is {args.alpha:g}, but must be a share, 0 to 1.")
        values = {
            "teacher_model": args.teacher_model,
            "student_model": args.student_model_name,
            "data_path": args.data_path,
            "epochs": 3.0,
            "batch_size": 2,
            "learning_rate": 2e-5,
            "alpha_kd": args.alpha,
            "alpha_ce": 1 - args.alpha,
            "temperature": 3.0,
            "model_dtype": "float32",
            "warmup_fraction": 0.1,
            "clip_grad": 1.0,
            "block_size": 512,
            "packing": False,  # a question a row
            "stop_after": 1,  # a NaN stops, and is explained ...
            "spike_factor": 1e9,  # ... while a large gradient is clipped, and no more
        }
        settings = read_settings(
            LanguageSettings,
            flags,
            CONFIG,
            prog=sys.argv[0],
            presets={"quantumbench": values},
            preset="quantumbench",
        )
        settings.check_packages()
        # --help and a wrong flag do without torch
        from ssl_kd.language.train.step import precision_of

        device = precision_of(settings).device
        if args.fp16 and device.type == "cuda":
            return settings.replace(model_dtype="float16")
        if args.fp16:
            message = f"--fp16 has no effect on {device}, which computes in float32"
            print(f"ssl_kd: {message}", file=sys.stderr)
        return settings

    return distill_as(read, [*program(sys.argv[0]), *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
