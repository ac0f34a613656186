"""Test the regret tables: what is measured, and how the pages describe it."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import regret
from benchmarks.peers import Method, variant
from benchmarks.regret import UNKNOWN, Scores, claim, draw_of, report, sets, tables_without_k
from benchmarks.sets import Sources
from benchmarks.turns import PAGE, README, section_of


def rows(name, draw=0, kind="natural", **accuracies):
    about = {"kind": kind, "set": name, "draw": draw, "n": 1234, "classes": 10, "constant": 10}
    keys = ("acc", "nmi", "ari", "balanced")
    return [
        {**about, "method": method, "seconds": 1.0} | dict.fromkeys(keys, accuracy)
        for method, accuracy in accuracies.items()
    ]


def test_regret_is_behind_the_best_of_a_draw_and_averaged_over_draws():
    scores = Scores(
        [
            *rows("digits", 0, kmeans=80, ward=75, ssl_kd=70),
            *rows("digits", 1, kmeans=80, ward=90, ssl_kd=84),
            *rows("umist", 0, kmeans=40, ward=30, ssl_kd=50),
            *rows("umist", 1, kmeans=40, ward=99),
        ]
    )
    assert scores.regret("ssl_kd") == {"digits": 8, "umist": 0}
    assert scores.regret("kmeans", "nmi") == {"digits": 5, "umist": 10}  # ours counts, too
    assert scores.n_incomplete == 1


def test_variants_do_not_compete_with_other_methods():
    draw = rows("digits", kmeans=80, ssl_kd=70) + rows("digits", **{"ssl_kd, beta=0.5": 90})
    scores = Scores(draw)
    assert scores.regret("ssl_kd") == {"digits": 10}
    assert scores.regret("ssl_kd, beta=0.5") == {"digits": 0}


def test_the_tables_begin_with_the_best_method_and_with_our_largest_loss():
    text = report(
        "natural",
        "report",
        [
            *rows("coil20", kmeans=80, ward=75, ssl_kd=85),
            *rows("palm100", kmeans=70, ward=60, ssl_kd=61),
            *rows("mouse_bladder", kmeans=70, ward=72, ssl_kd=71.5),
        ],
    )
    lines = text["natural"].splitlines()
    methods = [line.split(" | ")[0] for line in lines if line.count(" | ") == 7]
    assert methods == ["| method", "| k-means", "| **ssl_kd**", "| Ward"]
    assert "| **ssl_kd** | 3.2 | 0.5 | 9.0 (palm100) | 3.2 | 3.2 | 1 | 1.0 |" in lines
    of_sets = [line for line in lines if line.count(" | ") == 9]
    assert [line.split(" | ")[0] for line in of_sets[1:]] == [
        "| palm100",
        "| mouse_bladder",
        "| coil20",
    ]
    assert of_sets[2] == (
        "| mouse_bladder | 1,234 | 10 | 10 | Ward | 72.0 | 71.5 | -0.5 | -0.5 | -0.5 |"
    )
    assert "Nothing was chosen" in lines[0]
    assert "chosen on these sets" in report("natural", "choose", rows("digits", ward=1))["choose"]


def test_the_claim_names_the_ranks_and_the_best_other_method():
    scores = Scores(
        [
            *rows("coil20", kmeans=80, ward=75, ssl_kd=85),
            *rows("palm100", kmeans=70, ward=60, ssl_kd=61),
            *rows("mouse_bladder", kmeans=70, ward=72, ssl_kd=71.5),
        ]
    )
    text = claim(scores)
    assert "ssl_kd is 3.2 points of accuracy behind the best method of a set, rank 2 of 3" in text
    assert "(median 0.5, rank 1 of 3; worst 9.0, palm100)" in text
    assert "its mean lead over k-means, the best other method, is -0.8" in text
    low, high = (float(number) for number in re.findall(r"sets: (\S+) to (\S+)\)", text)[0])
    assert -9 <= low < -0.8 < high <= 5  # the lead on single sets: 5, -9 and 1.5


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_are_random_and_scaled_by_kind(seed):
    x, y = np.random.default_rng(0).normal(3, 2, size=(400, 5)), np.arange(400) % 8
    rows, labels = draw_of("natural", "digits", x, y, seed)
    assert rows.shape == (320, 5) and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert not np.array_equal(rows[:3], draw_of("natural", "digits", x, y, seed + 1)[0][:3])
    rows, labels = draw_of("tables", "wine", x, y, seed)
    assert np.allclose(rows.mean(0), 0, atol=1e-5) and np.allclose(rows.std(0), 1, atol=1e-4)
    rows, labels = draw_of("folders", "digits_folder_3_60", x, y, seed)
    assert set(labels) == {0, 1, 2} and 12 <= len(rows) <= 60


def test_half_precision_rows_do_not_overflow():
    x = np.full((10, 4), 60_000, np.float16)
    rows, _ = draw_of("natural", "digits", x, np.arange(10) % 2, 0)
    assert np.allclose(rows, 0.5)


@pytest.fixture
def features(tmp_path):
    """Return a folder of three readable sets, and one of the other shelf that is damaged."""
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.repeat([0, 1, 2], 20)
    for name, n, width in (("usps_small", 60, 3), ("ZOO", 60, 3), ("letter26", 20, 60)):
        np.savez(tmp_path / f"{name}.npz", x=np.resize(x, (n, width)), y=y[:n])
    (tmp_path / "coil20.npz").write_text("damaged")
    return tmp_path


def names(kind, shelf, folder, only=()):
    return [name for name, _ in sets(kind, shelf, [folder], Sources(data_dir=folder), only)]


def test_a_set_of_the_other_shelf_is_not_opened(features, capsys):
    assert names("natural", "choose", features) == ["digits", "letter26", "usps_small", "zoo"]
    assert "fashion10k is skipped" in capsys.readouterr().err
    with pytest.raises(ValueError, match="allow_pickle|pickled"):
        names("natural", "report", features, ["coil20"])


def test_each_kind_has_its_own_sets(features, capsys):
    assert names("tails", "choose", features, ["usps_small"]) == [
        "usps_small_lt10",
        "usps_small_lt100",
    ]
    assert names("tables", "choose", features) == ["wine", "breast_cancer", "usps_small", "zoo"]
    assert "letter26 is skipped: 20 x 60; a small table has" in capsys.readouterr().err
    assert names("tables", "report", features, ["iris"]) == ["iris"]
    assert names("synthetic", "choose", features) == ["unequal", "rare"]


def test_a_wrong_name_is_refused(features):
    with pytest.raises(ValueError, match=r"shelf choose have the names coil20.* expected .*zoo"):
        names("natural", "choose", features, ["coil20", "zoo"])
    again = features / "again"
    again.mkdir()
    np.savez(again / "zoo.npz", x=np.ones((2, 2)), y=np.arange(2))
    with pytest.raises(ValueError, match="two sets have the name zoo: rename"):
        list(sets("natural", "choose", [features, again], Sources()))
    with pytest.raises(ValueError, match="NAME=VALUE"):
        variant("method")


def test_cluster_counts_without_k_are_shown_with_the_class_count():
    with_k = rows("digits", kmeans=80, ssl_kd=75)
    about: dict = with_k[0] | {"acc": 65}
    free = [about | {"method": "evoc" + UNKNOWN, "found": 31}]
    free.append(about | {"method": "ssl_kd" + UNKNOWN, "found": 12, "interval": (8, 25)})
    out = tables_without_k([*with_k, *free])
    assert "| digits | 10 | 31 | 12 | 8 to 25 |" in out
    assert "| **ssl_kd** | 1 | 1 | 10.0 | 10.0 (digits) |" in out
    assert "| EVoC | 0 | 1 |  |  |" in out
    assert out[-1].startswith("The interval contains the true K in 1 of 1 draws")
    assert out[-1].endswith("factor of at most 3 in 0.")
    assert Scores([*with_k, *free]).regret("ssl_kd") == {"digits": 5}  # only with K
    assert tables_without_k(with_k) == []


@pytest.fixture
def calls(monkeypatch, features):
    """Replace the methods by one that cuts the first column, and return what it was called with."""
    calls = []

    def halves(x, n_clusters, seed):
        calls.append((len(x), n_clusters, seed))
        return (x[:, 0] > 0).astype(int)

    methods = {name: Method(name, halves) for name in ("kmeans", "ward", "ssl_kd")}
    methods["absent"] = Method("absent", halves, packages=("no_such_package",))
    monkeypatch.setattr(regret, "METHODS", methods)
    flags = ["--shelf", "choose", "--features", str(features), "--sets", "usps_small,zoo"]
    monkeypatch.setattr(sys, "argv", ["regret", *flags, "--json", str(features / "rows.jsonl")])
    return calls


def more(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [*sys.argv, *flags])
    regret.main()


def test_a_run_is_continued(features, monkeypatch, capsys, calls):
    more(monkeypatch, "--draws", "1")
    assert [call for call in calls if call[0] == 48] == [(48, 3, 0)] * 6
    output = capsys.readouterr()
    assert "pip install no_such_package" in output.err and "sets: 2, draws of each: 1" in output.out
    before = (features / "rows.jsonl").read_text()
    calls.clear()
    # Ours is not replaced here where it has no K.
    more(monkeypatch, "--unknown", "--methods", "kmeans,ward", "--draws", "2")
    assert (features / "rows.jsonl").read_text().startswith(before)
    assert (48, None, 0) in calls and (48, 3, 0) not in calls and (48, 3, 1) in calls


def test_only_the_rows_of_the_shelf_and_kind_are_shown(features, monkeypatch, capsys, calls):
    every = rows("coil20", kmeans=1, ward=2) + rows("wine", kind="tables", kmeans=3, ward=4)
    every += rows("umist", kmeans=5, ward=7)
    (features / "rows.jsonl").write_text("\n".join(map(json.dumps, every)))
    more(monkeypatch, "--draws", "0")
    output = capsys.readouterr().out
    assert "sets: 1," in output and "2.0 (umist)" in output and not calls


@pytest.mark.parametrize("name", ["natural", "tails", "folders", "tables", "unknown", "clubench"])
def test_the_results_have_a_section_for_each_table(name):
    assert section_of(name, PAGE.read_text(encoding="utf-8"))


def test_the_readme_has_a_section_for_its_table():
    assert section_of("readme", README.read_text(encoding="utf-8"))


def test_tables_are_written_into_their_sections(features, monkeypatch, capsys, calls):
    every = rows("umist", kmeans=5, ward=7, ssl_kd=9)
    (features / "rows.jsonl").write_text("\n".join(map(json.dumps, every)))
    pages = {"PAGE": "choose", "README": "readme"}
    for name, section in pages.items():
        page = features / name
        page.write_text(f"A.\n\n<!-- {section}: command -->\n\nold\n<!-- end -->\n\nZ.\n")
        monkeypatch.setattr(regret, name, page)
    more(monkeypatch, "--draws", "0", "--write")
    page, readme = (Path(features / name).read_text() for name in pages)
    assert page.startswith("A.") and page.endswith("Z.\n") and "old" not in page
    assert re.search(r"ssl_kd\W+0\.0 \|", page) and "old" in readme  # which shows `report`
    assert capsys.readouterr().out == ""
