"""Define the commands of `ssl_kd`; a failure that a user can act on is printed as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from ssl_kd import __version__
from ssl_kd.cli.checks import config, doctor, install_check, replay
from ssl_kd.cli.evaluate import evaluate
from ssl_kd.cli.failures import LANGUAGE_MEMORY, guarded, keep_writing, print_failure, use_utf8
from ssl_kd.cli.language import cache_teacher, distill, distill_as, judge, verify
from ssl_kd.cli.recipes import recipes
from ssl_kd.cli.report import report
from ssl_kd.cli.sweep import sweep, table
from ssl_kd.cli.vision import program, train
from ssl_kd.core.errors import BAD_INPUT, OK
from ssl_kd.core.explorer import command
from ssl_kd.core.settings import nearest

__all__ = [
    "COMMANDS",
    "LANGUAGE_MEMORY",
    "cache_teacher",
    "distill",
    "distill_as",
    "guarded",
    "main",
    "program",
    "train",
]

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (partial(train, prog="ssl_kd train"), "cluster images: embed, train, score, report"),
    "extract": (
        lambda argv: train(["extract", *argv], prog="ssl_kd"),
        "cache a teacher's embeddings, on one machine or many, and stop",
    ),
    "evaluate": (evaluate, "judge teachers by their embeddings, with and without labels"),
    "distill": (partial(distill, prog="ssl_kd distill"), "distill a language model"),
    "recipes": (recipes, "list published settings for --recipe: their numbers, what differs here"),
    "sweep": (sweep, "train a grid of runs: ssl_kd sweep --beta 0.5,0.6 --seed 0..4 --name betas"),
    "table": (table, "put runs in a table: means over seeds, differences, tests; CSV, LaTeX"),
    "judge": (judge, "score a finished student: perplexity, calibration, repetition"),
    "verify": (verify, "compare the losses of live and cached teachers on your models"),
    "curate": (command("curate"), "find duplicates, outliers, leaks and wrong labels"),
    "explore": (
        command("explore"),
        "show a run's samples on a map; name, merge and split its clusters",
    ),
    "watch": (
        command("watch"),
        "add the new pictures of a folder to a run, and report what drifted",
    ),
    "compare": (
        command("compare"),
        "show where the clusters of two runs differ, and which are better",
    ),
    "select": (
        command("select"),
        "choose typical, diverse or balanced samples; hold out a part without copies",
    ),
    "report": (report, "write a run's report anew, with the names and decisions of people"),
    "export": (command("export"), "write a finished run for other programs"),
    "doctor": (doctor, "check for NaN and infinity; doctor gradients: in your language model"),
    "install-check": (install_check, "check packages, device, precision and folders"),
    "replay": (replay, "repeat a recorded step that went wrong, and name the cause"),
    "config": (config, "print a settings file with all defaults and comments"),
}
_OF_LANGUAGE_MODELS = {"doctor", "judge", "verify"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, `ssl_kd train | distill | doctor ...`, and return its exit code.

    Args:
        argv: The arguments after the program name; None: `sys.argv[1:]`.
    """
    use_utf8()
    keep_writing()
    if argv is None:
        sys.path.append("")  # the current folder, as for `python train.py`: heads/ is there
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  ssl_kd {name:<14} {about}" for name, (_, about) in COMMANDS.items()]
        print("usage: ssl_kd COMMAND [flags]\n\n" + "\n".join(lines))
        print("\nssl_kd COMMAND --help lists the flags of a command.")
        return OK
    if name == "--version":
        print(__version__)
        return OK
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS)
        print_failure(f"There is no command {name!r}. Commands: {', '.join(COMMANDS)}.{hint}")
        return BAD_INPUT
    memory = {"memory": LANGUAGE_MEMORY} if name in _OF_LANGUAGE_MODELS else {}
    return guarded(lambda: COMMANDS[name][0](rest), **memory)
