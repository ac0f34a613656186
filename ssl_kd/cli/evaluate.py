"""The command `evaluate`: judge the embeddings of teachers without training heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.cli.failures import guarded
from ssl_kd.cli.flags import FlagParser, resolve_settings
from ssl_kd.core.errors import OK, InputError
from ssl_kd.core.settings.early import check_dataset

if TYPE_CHECKING:
    from rich.table import Table

_DESCRIPTION = """Embeds the data set, or reads the cache, and prints the accuracy of k-NN (k = 20),
of a linear probe (logistic regression) and of probes on 1, 5 and 10 samples of each class (mean of
ten draws), and RankMe, which needs no labels. Several values of a setting, such as --teacher
dinov2_vits14,clip, are compared. The flags are those of ssl_kd train."""
# Settings of runs, of which there is none here.
_REFUSED: Mapping[str, str] = dict.fromkeys(
    ("run_name", "runs_dir", "resume", "extend"),
    "has no effect, because ssl_kd evaluate starts no run: leave it out (--out FILE writes the "
    "scores)",
)


def evaluate(argv: Sequence[str]) -> int:
    """Print scores of embeddings, and write them to a file."""
    return guarded(partial(_evaluate, argv), kept="complete shards")


def _evaluate(argv: Sequence[str]) -> int:
    parser = FlagParser(prog="ssl_kd evaluate", description=_DESCRIPTION)
    parser.add_argument("--out", type=Path, help="JSON file for the scores and how to repeat them")
    flags, rest = parser.parse_known_args(argv)

    from ssl_kd.sweep.grid import Grid, flags_of
    from ssl_kd.vision.settings import VisionSettings

    grid = Grid.read(VisionSettings, rest, _REFUSED)
    compared = []
    for own in list(grid.combinations().values()) if grid.axes else [{}]:
        flags_of_run = [*grid.flags, *flags_of(own)]
        settings, _ = resolve_settings(
            VisionSettings, flags_of_run, Path("config.py"), prog="ssl_kd evaluate"
        )
        check_dataset(settings.dataset)
        check_dataset(settings.dataset_test)
        if settings.extend is not None:
            raise InputError(f"EXTEND is {settings.extend!r}, and {_REFUSED['extend']}")
        compared.append(settings)

    from ssl_kd.cli.screen import ProgressBars, open_screen, print_result

    screen = open_screen()
    from ssl_kd.core.files import atomic_write_json
    from ssl_kd.core.runs.folder import check_writable
    from ssl_kd.vision.evaluate_teacher import evaluate_teacher

    if flags.out is not None:
        check_writable("OUT", flags.out, is_file=True)
    with ProgressBars(screen) as progress:
        scores = [evaluate_teacher(settings, progress=progress) for settings in compared]
    files = {}
    if flags.out is not None:
        atomic_write_json(flags.out, scores)
        files["Scores"] = flags.out
    print_result(_table(scores, list(grid.axes)), files)
    return OK


def _table(scores: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> Table:
    """Return a row for each teacher; accuracies in percent."""
    from ssl_kd.core.pages.tables import new_table

    others = [axis for axis in axes if axis != "teacher"]
    labeled = [row for row in scores if row["few_shot"] is not None]
    shots = [probe["shots"] for probe in labeled[0]["few_shot"]] if labeled else []
    table = new_table(None, "teacher")
    columns = [*others, "width", "k-NN, %", "linear probe, %"]
    for name in [*columns, *(f"{n}-shot, %" for n in shots), "RankMe"]:
        table.add_column(name, justify="right")
    for row in scores:
        probe = (row["linear_probe"] or {}).get("accuracy")
        few = [_spread(p) for p in row["few_shot"]] if row["few_shot"] else ["-"] * len(shots)
        table.add_row(
            row["teacher"]["name"],
            *(str(row["settings"][axis.upper()]) for axis in others),
            f"{row['teacher']['dim']}",
            *(_percent(value) for value in (row["knn_accuracy"], probe)),
            *few,
            f"{row['rankme']:.1f}",
        )
    return table


def _percent(share: float | None) -> str:
    from ssl_kd.core.pages.wording import percent

    return "-" if share is None else percent(share)


def _spread(probe: Mapping[str, Any]) -> str:
    if probe["accuracy"] is None:
        return "-"
    return f"{_percent(probe['accuracy'])} ± {_percent(probe['deviation'])}"
