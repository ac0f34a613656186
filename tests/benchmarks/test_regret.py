"""Test the regret tables, and the rule fitted on the other families of sets."""

import sys

import numpy as np
import pytest

from benchmarks import regret
from benchmarks.peers import Method
from benchmarks.regret import EVEN, UNKNOWN, Regrets, draw_of, family, numbers, report


def rows(name, evenness, even, uneven, peer, ours=50.0):
    about = {"set": name, "draw": 0, "n": 100, "classes": 10, "seconds": 1.0}
    accuracies = {"kmeans": peer, "ward": peer - 5, "ssl_kd": ours, "even": even}
    accuracies |= {"between": min(even, uneven) - 9, "uneven": uneven}
    return [
        {**about, "method": method, "evenness": evenness}
        | dict.fromkeys(("acc", "nmi", "ari", "balanced"), accuracy)
        for method, accuracy in accuracies.items()
    ]


def test_regret_is_behind_the_best_peer_and_negative_ahead_of_it():
    regrets = Regrets([*rows("digits", 0.99, 70, 60, 80, ours=75), *rows("umist", 0.9, 40, 50, 45)])
    assert regrets.of("ssl_kd", "acc") == {"digits": 5, "umist": -5}
    assert regrets.of("ward", "nmi") == {"digits": 5, "umist": 5}  # a peer: behind the others
    half = rows("usps", 0.9, 1, 2, 3)[:3]
    assert Regrets(half).sets == []  # an incomplete draw does not count


def test_a_rule_is_chosen_on_other_families_only():
    assert family("fashion10k_lt10") == family("fashion10k_efficientnet") == "fashion"
    # In all other families the second vote wins below 0.96; in fashion it always loses.
    others = [row for name in "abc" for row in rows(name, 0.955, 50, 60, 60)]
    others += [row for name in "de" for row in rows(name, 0.965, 60, 50, 60)]
    fashion = rows("fashion10k", 0.955, 60, 45, 60)
    regrets = Regrets([*others, *fashion])
    left_out = regrets.of(regrets.left_out(), "acc")
    assert left_out["fashion10k"] == 15  # the rule of the other families, not of its own
    assert left_out["a"] == 0 and left_out["d"] == 0
    text = report([*others, *fashion])
    assert "6 sets, 6 draws" in text and str(EVEN) in text


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_are_random_and_those_of_folders_have_some_classes(seed):
    x, y = np.random.default_rng(0).normal(size=(400, 5)), np.arange(400) % 8
    rows, labels = draw_of("digits", x, y, seed)
    assert rows.shape == (320, 5) and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    rows, labels = draw_of("digits_folder_3_60", x, y, seed)
    assert set(labels) == {0, 1, 2} and 12 <= len(rows) <= 60
    assert not np.array_equal(rows[:3], draw_of("digits_folder_3_60", x, y, seed + 1)[0][:3])


def test_cluster_counts_without_k_are_shown_with_the_class_count():
    with_k = rows("digits", 0.99, 70, 60, 80, ours=75)
    about: dict = with_k[0] | {"acc": 65}
    free = [about | {"method": "evoc" + UNKNOWN, "found": 31}]
    free.append(about | {"method": "ssl_kd" + UNKNOWN, "found": 12, "interval": (8, 18)})
    out = numbers([*with_k, *free])
    assert "| digits | 10 | 31 | 12 |" in out
    assert "| **ssl_kd** | 1 | 1 | 10.0 | 10.0 (digits) |" in out
    assert "| EVoC | 0 | 1 |  |  |" in out
    assert out[-1] == "The interval contains the true K in 1 of 1 draws."
    assert Regrets([*with_k, *free]).of("ssl_kd", "acc") == {"digits": 5}  # only with K
    assert numbers(with_k) == []


def test_a_run_is_continued(tmp_path, monkeypatch, capsys):
    calls = []

    def halves(x, n_clusters, seed):
        calls.append((n_clusters, seed))
        return (x[:, 0] > 0).astype(int)

    x, y = np.random.default_rng(0).normal(size=(120, 3)), np.arange(120) % 2
    methods = {name: Method(name, halves) for name in ("halves", "others", "ssl_kd")}
    methods["absent"] = Method("absent", halves, packages=("no_such_package",))
    monkeypatch.setattr(regret, "sets", lambda features, sources: [("line", (x, y))])
    monkeypatch.setattr(regret, "METHODS", methods)
    monkeypatch.setattr("benchmarks.peers.METHODS", methods)
    monkeypatch.setattr(regret, "PEERS", {"halves", "others"})
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["regret", "--draws", "1", "--json", str(file)])
    regret.main()
    assert calls[-3:] == [(2, 0)] * 3
    assert "pip install no_such_package" in capsys.readouterr().err
    before = file.read_text()
    calls.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--unknown"])
    regret.main()
    assert file.read_text().startswith(before)
    assert (None, 0) in calls and (2, 0) not in calls
    assert "1 sets, 1 draws" in capsys.readouterr().out
