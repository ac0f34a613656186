"""The command `evaluate`: judge the embeddings of teachers without training heads."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.cli.failures import guarded
from ssl_kd.cli.flags import FlagParser, integer_from, resolve_settings
from ssl_kd.core.errors import OK, InputError
from ssl_kd.core.settings.early import check_dataset
from ssl_kd.core.settings.recipes import log_recipe

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger(__name__)

_DESCRIPTION = """Embeds the data set, or reads the cache, and prints the accuracy of k-NN (k = 20),
of a linear probe and of probes on 1, 5 and 10 samples of each class (mean of ten draws), and
RankMe, alpha-ReQ, LiDAR and, of several teachers, the neighbors that they share, which need no
labels. Several values of a setting, such as --teacher dinov2_vits14,clip, are compared. The flags
are those of ssl_kd train. With folders of caches instead (ssl_kd evaluate CACHE CACHE), these are
scored, without data and teacher."""
# Settings of runs, of which there is none here.
_REFUSED: Mapping[str, str] = dict.fromkeys(
    ("run_name", "runs_dir", "resume", "extend"),
    "has no effect, because ssl_kd evaluate starts no run: leave it out (--out FILE writes the "
    "scores)",
)
_NO_RANKING = """Which teacher is best cannot be told without labels: each of these columns ranks
the teachers of some data sets well and those of others badly (docs/results.md). With a few labels
of each class (--labels), the few-shot probes compare them."""


def evaluate(argv: Sequence[str]) -> int:
    """Print scores of embeddings, and write them to a file."""
    return guarded(partial(_evaluate, argv), kept="complete shards")


def _evaluate(argv: Sequence[str]) -> int:
    caches = [Path(word) for word in itertools.takewhile(lambda w: w[:1] != "-", argv)]
    parser = FlagParser(
        prog="ssl_kd evaluate", usage="%(prog)s [CACHE ...] [flags]", description=_DESCRIPTION
    )
    parser.add_argument("--out", type=Path, help="JSON file for the scores and how to repeat them")
    parser.add_argument(
        "--probe",
        choices=("logistic", "sgd"),
        help="linear probe: logistic regression (the default, unless --recipe names the other), or"
        " SGD over 13 learning rates as in DINOv2",
    )
    parser.add_argument(
        "--probe-steps", type=integer_from(1), help="updates of --probe sgd (default: 12,500)"
    )
    about_views = "views of each of 200 images, from 2, from which LiDAR is computed"
    parser.add_argument("--views", type=integer_from(2), default=0, help=about_views)
    flags, rest = parser.parse_known_args(argv[len(caches) :])
    score = partial(_score_caches, caches) if caches else _score_teachers
    axes, scores = score(rest, flags)
    files = {}
    if flags.out is not None:
        from ssl_kd.core.files import atomic_write_json

        atomic_write_json(flags.out, scores)
        files["Scores"] = flags.out

    from ssl_kd.cli.screen import print_result

    print_result(_table(scores, axes), {})
    for note in _notes(scores):
        print(note)
    if len(scores) > 1 and all(row["few_shot"] is None for row in scores):
        print(_NO_RANKING)
    for name, file in files.items():
        print(f"{name}: {file}")
    return OK


def _score_teachers(words: Sequence[str], flags: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the settings with several values, and the scores of each combination."""
    from ssl_kd.sweep.grid import Grid, flags_of
    from ssl_kd.vision.settings import VisionSettings

    grid = Grid.read(VisionSettings, words, _REFUSED)
    compared = []
    for own in list(grid.combinations().values()) if grid.axes else [{}]:
        flags_of_run = [*grid.flags, *flags_of(own)]
        settings, _ = resolve_settings(
            VisionSettings, flags_of_run, Path("config.py"), prog="ssl_kd evaluate"
        )
        settings.check_recipe("evaluate")
        check_dataset(settings.dataset)
        check_dataset(settings.dataset_test)
        if settings.extend is not None:
            raise InputError(f"EXTEND is {settings.extend!r}, and {_REFUSED['extend']}")
        compared.append(settings)

    recipe = VisionSettings.recipes.get(compared[0].recipe or "")
    if flags.probe is None and recipe is not None:
        flags.probe = recipe.flags.get("probe")
    _check_probe(flags)

    from ssl_kd.cli.screen import ProgressBars, open_screen

    screen = open_screen()
    log_recipe(compared[0], logger, vars(flags))
    from ssl_kd.vision.evaluate_teacher import evaluate_teachers

    protocol = _protocol(flags, 0)
    with ProgressBars(screen) as progress:
        scores = evaluate_teachers(compared, protocol, progress=progress)
    return list(grid.axes), scores


def _score_caches(
    caches: Sequence[Path], words: Sequence[str], flags: Any
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return no settings, and the scores of each cache."""
    parser = FlagParser(prog="ssl_kd evaluate")
    parser.add_argument("--seed", type=integer_from(0), default=0)
    seed, others = parser.parse_known_args(words)
    if others:
        raise InputError(
            f"{others[0]} has no effect on caches, which are scored as they are: leave it out. "
            "--seed, --out, --probe and --probe_steps go with caches"
        )
    if flags.views:
        raise InputError(
            f"--views is {flags.views}, but a cache holds no images, of which views could be made: "
            "name the data by --dataset instead"
        )

    _check_probe(flags)
    from ssl_kd.cli.screen import open_screen

    open_screen()
    from ssl_kd.vision.evaluate_teacher import evaluate_caches

    return [], evaluate_caches(caches, _protocol(flags, seed.seed))


def _check_probe(flags: Any) -> None:
    """Raise InputError if --probe_steps has no effect on the probe."""
    if flags.probe_steps is not None and flags.probe != "sgd":
        raise InputError(
            "--probe_steps has no effect without --probe sgd: add that, or leave it out"
        )


def _protocol(flags: Any, seed: int) -> Any:
    from ssl_kd.core.runs.folder import check_writable
    from ssl_kd.vision.evaluate_teacher import Protocol

    if flags.out is not None:
        check_writable("OUT", flags.out, is_file=True)
    steps = {} if flags.probe_steps is None else {"probe_steps": flags.probe_steps}
    return Protocol(seed, flags.probe or "logistic", views=flags.views, **steps)


def _table(scores: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> Table:
    """Return a row for each teacher; accuracies in percent, left out if no data set has labels."""
    from ssl_kd.core.pages.tables import new_table

    others = [axis for axis in axes if axis != "teacher"]
    labeled = [row for row in scores if row["few_shot"] is not None]
    shots = [probe["shots"] for probe in labeled[0]["few_shot"]] if labeled else []
    table = new_table(None, "teacher")
    columns = [*others, "width"]
    if labeled:
        columns += ["k-NN, %", "linear probe, %", *(f"{n}-shot, %" for n in shots)]
    agree = scores[0]["agreement"] is not None
    columns += ["RankMe", "alpha-ReQ", "LiDAR", *(["agreement, %"] if agree else [])]
    for name in columns:
        table.add_column(name, justify="right")
    for row in scores:
        cells = [str(row["settings"][axis.upper()]) for axis in others]
        cells.append(f"{row['teacher']['dim']}")
        if labeled:
            probe = (row["linear_probe"] or {}).get("accuracy")
            cells += [_percent(value) for value in (row["knn_accuracy"], probe)]
            cells += (
                [_spread(p) for p in row["few_shot"]] if row["few_shot"] else ["-"] * len(shots)
            )
        alpha, lidar = row["alpha_req"], row["lidar"]["value"]
        cells += [f"{row['rankme']:.1f}", "-" if alpha is None else f"{alpha:.2f}"]
        cells.append("one view" if lidar is None else f"{lidar:.1f}")
        if agree:
            cells.append(_percent(row["agreement"]))
        table.add_row(row["teacher"]["name"], *cells)
    return table


def _notes(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each remark on a probe, with the teacher unless it is that of all."""
    teachers: dict[str, list[str]] = {}
    for row in scores:
        for probe in row["few_shot"] or []:
            if probe["note"]:
                line = f"{probe['shots']}-shot: {probe['note']}"
                teachers.setdefault(line, []).append(row["teacher"]["name"])
    return [
        line if len(names) == len(scores) else f"{', '.join(names)}, {line}"
        for line, names in teachers.items()
    ]


def _percent(share: float | None) -> str:
    from ssl_kd.core.pages.wording import percent

    return "-" if share is None else percent(share)


def _spread(probe: Mapping[str, Any]) -> str:
    if probe["accuracy"] is None:
        return "-"
    return f"{_percent(probe['accuracy'])} ± {_percent(probe['deviation'])}"
