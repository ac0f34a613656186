"""How good the answer is: many data sets, ours and the peers a user can install, over seeds.

    python -m benchmarks.quality --sets digits                    # a first table, five seeds
    python -m benchmarks.quality --cifar FOLDER --json rows.jsonl   # everything; may be continued
    python -m benchmarks.quality --table rows.jsonl               # only the table of these rows

All methods get the same embeddings (`benchmarks.sets`) and the number of classes; with `--unknown`
they also run without it. Labels are read only to score. Noise, which some peers leave, is given to
its nearest clusters afterwards. Seconds are of the one call that clusters, in this process; peers
have run on small random data before, so that nothing is imported or compiled in them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import METHODS, installed, warm_up, without_noise
from benchmarks.sets import SETS, Sources, loaded
from ssl_kd import evaluate

SCORES = ("acc", "nmi", "ari", "balanced")
Row = dict[str, Any]


def measure(name: str, x: NDArray, y: NDArray, given: bool, seed: int) -> Row:
    """One run of one method: scores in percent, clusters found and seconds."""
    n_clusters = len(np.unique(y)) if given else None
    began = time.perf_counter()
    clusters = METHODS[name].run(x, n_clusters, seed)
    seconds = time.perf_counter() - began
    noise = float(np.mean(clusters < 0))
    clusters = without_noise(x, clusters)
    scores = evaluate.clustering_scores(y, clusters)
    scores["balanced"] = evaluate.balanced_accuracy(y, clusters)
    row = {key: round(100 * (scores[key] or 0.0), 3) for key in SCORES}
    return row | {"found": len(np.unique(clusters)), "noise": noise, "seconds": round(seconds, 3)}


def run(args: argparse.Namespace, rows: list[Row]) -> None:
    """Add the rows that are not there yet, and append each to the file as soon as it is known."""
    done = {(row["set"], row["method"], row["given"], row["seed"]) for row in rows}
    modes = (True, False) if args.unknown else (True,)
    methods = installed(args.methods)
    warm: set[tuple[str, bool]] = set()
    todo = {
        name: [
            (method, given, seed)
            for given in modes
            for method in methods
            for seed in range(args.seeds)
            if (METHODS[method].given if given else METHODS[method].not_given)
            and (name, method, given, seed) not in done
        ]
        for name in args.sets
    }
    wanted = {name: SETS[name] for name in args.sets if todo[name]}
    for name, x, y in loaded(wanted, Sources.of(args)):
        about = {"set": name, "n": len(x), "dim": x.shape[-1], "classes": len(np.unique(y))}
        for method, given, seed in todo[name]:
            key = {"method": method, "given": given, "seed": seed}
            try:
                if (method, given) not in warm:
                    warm_up(method, 5 if given else None)
                    warm.add((method, given))
                row = about | key | measure(method, x, y, given, seed)
            except Exception as error:  # a long run goes on without this row
                print(f"{name} {key}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            rows.append(row)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)


def read(files: Sequence[Path]) -> list[Row]:
    """Rows of all files; where one was measured twice the last counts."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return list({(r["set"], r["method"], r["given"], r["seed"]): r for r in rows}.values())


Runs = dict[tuple[str, bool], list[Row]]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def by_set(rows: Sequence[Row]) -> dict[str, Runs]:
    """Rows of each set by method and whether K was given, all in the order of the tables."""
    sets, methods = list(SETS), list(METHODS)
    rows = sorted(
        rows, key=lambda r: (sets.index(r["set"]), not r["given"], methods.index(r["method"]))
    )
    found: dict[str, Runs] = {}
    for row in rows:
        runs = found.setdefault(row["set"], {})
        runs.setdefault((row["method"], row["given"]), []).append(row)
    return found


def middle(runs: Sequence[Row], key: str) -> float:
    return median(row[key] for row in runs)


def set_table(name: str, runs: Runs) -> str:
    """Every method on one set."""
    of = next(iter(runs.values()))[0]
    head = ["method", "ACC median (lowest to highest)", "NMI", "ARI", "balanced ACC", "clusters"]
    lines = [f"### {name}: {of['n']:,} x {of['dim']:,}, {of['classes']} classes", ""]
    lines += [_line([*head, "seconds", "seeds"]), "|---" * 8 + "|"]
    for (method, given), some in runs.items():
        acc = [row["acc"] for row in some]
        cells = [METHODS[method].title + ("" if given else ", K not given")]
        cells += [f"{median(acc):.1f} ({min(acc):.1f} to {max(acc):.1f})"]
        cells += [f"{middle(some, key):.1f}" for key in ("nmi", "ari", "balanced")]
        cells += [f"{middle(some, 'found'):.0f}", f"{middle(some, 'seconds'):.1f}", str(len(some))]
        lines.append(_line(cells))
    return "\n".join(lines)


def report(rows: Sequence[Row]) -> str:
    """Everything in Markdown."""
    return "\n\n".join(set_table(name, runs) for name, runs in by_set(rows).items())


def names_of(known: dict[str, Any], text: str) -> list[str]:
    """The names in a comma-separated flag, all of which are known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description="Ours and its peers on many data sets.")
    parser.add_argument("--sets", type=lambda text: names_of(SETS, text), default=list(SETS))
    parser.add_argument(
        "--methods", type=lambda text: names_of(METHODS, text), default=list(METHODS)
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--unknown", action="store_true", help="also without the number of classes")
    parser.add_argument("--json", type=Path, help="file of rows, to continue and to add to")
    parser.add_argument("--table", type=Path, nargs="+", help="only print the rows of these files")
    Sources.add_flags(parser)
    args = parser.parse_args()
    rows = read(args.table or [file for file in (args.json,) if file and file.exists()])
    if not args.table:
        run(args, rows)
    print(report(rows))


if __name__ == "__main__":
    main()
