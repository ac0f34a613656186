"""A whole run in fp16 beside the same run in fp32, on a CPU that emulates fp16.

    python -m benchmarks.half_precision --max_steps 500

Plain distillation from a dense teacher, and SAR from a mixture of 8 experts; both teachers are
trained on the text first, in fp32, unless --teacher_model and --experts_model name them.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.distillation import add_settings, measure, with_teacher
from ssl_kd.language.settings import LanguageSettings

HALF = {"model_dtype": "float16", "emulate_fp16": True}
ROUTER = ("router", "router_drift", "router_entropy")


def look(folder: Path) -> dict[str, Any]:
    """What the guard had to do, and whether the router stayed finite: weights and log lines."""
    metrics = json.loads((folder / "metrics.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [line[name] for line in lines for name in ROUTER if name in line]
    file = folder / "router.safetensors"
    weights = list(load_file(file).values()) if file.exists() else []
    finite = None not in logged and all(bool(tensor.isfinite().all()) for tensor in weights)
    return {"events": metrics["events"], "gates": finite if weights else None}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=("plain", "sar"), default=("plain", "sar"))
    parser.add_argument("--experts_model", default="train", help="a mixture of experts, for sar")
    add_settings(
        parser,
        *("teacher_model", "teacher_size", "teacher_steps", "data_path", "eval_path", "seed"),
        *("max_steps", "batch_size", "block_size", "eval_rows", "learning_rate"),
        *("temperature", "alpha_kd", "alpha_ce", "router_lr", "vocabulary"),
        student_model="llama:2x96",
    )
    given = vars(parser.parse_args())
    only, experts = given.pop("only"), given.pop("experts_model")
    logging.basicConfig(level=logging.ERROR)
    steps = given["max_steps"]
    settings = LanguageSettings(
        **given,
        model_dtype="float32",
        log_every=1,  # a line is a mean of what is finite
        eval_every=max(1, steps // 5),
        generations=0,
        answer_prompts=0,
    )
    kinds = {
        "plain": ("plain distillation", {}),
        "sar": (
            "SAR, 8 experts",
            {"teacher_model": experts, "teacher_experts": 8, "router_mode": "sar"},
        ),
    }
    columns = ["run", "success rate", "skipped steps", "events of the guard", "gates finite"]
    columns += ["held-out perplexity", "of fp32", "seconds"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, chosen in (kinds[kind] for kind in only):
        taught = with_teacher(settings.replace(**chosen))
        full = None
        for precision, numbers in (("fp32", {}), ("fp16", HALF)):
            row = measure(taught.replace(**numbers), look)
            full = full or row["perplexity"]
            cells = [
                f"{100 * row['success_rate']:.1f} %",
                f"{steps - round(row['success_rate'] * steps)} of {steps}",
                str(row["events"]),
                {True: "yes", False: "no", None: ""}[row["gates"]],
                f"{row['perplexity']:.4f}",
                f"{row['perplexity'] / full:.4f}",
                f"{row['seconds']:.0f}",
            ]
            print(f"| {name}, {precision} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
