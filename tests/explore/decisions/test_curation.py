"""Decisions about clusters: each is a line of a file that is read, undone and applied again."""

import json
import multiprocessing
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ssl_kd import cli
from ssl_kd.core import files
from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.files.lock import Lock, LockHeld
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation, line_format, schema
from ssl_kd_explore.decisions import curation as module
from tests.faults.matrix import row as fault


@pytest.fixture
def run(photo_run, tmp_path):
    """A copy of the run's folder, for a test to decide about."""
    return shutil.copytree(photo_run, tmp_path / "copy")


def members(curation, cluster):
    return np.flatnonzero(curation.clusters == cluster)


def test_rename_merge_split_move_exclude_and_read_again(run):
    samples = Samples(run)
    curation = Curation.open(samples)
    assert np.array_equal(curation.clusters, samples.column("cluster"))
    assert curation.lines == [] and not (run / "curation.jsonl").exists()
    curation.rename(0, "zeros")
    curation.merge([2, 1])
    rows = members(curation, 1)[:5]
    curation.split(1, rows, name="odd ones")
    curation.move(rows[:2], 0)
    curation.exclude(members(curation, 0)[-1:])
    assert curation.names == {0: "zeros", 1000: "odd ones"}
    assert set(curation.sizes) == {0, 1, 1000} and curation.sizes[1000] == 3
    assert (curation.clusters[rows] == [0, 0, 1000, 1000, 1000]).all()
    assert curation.excluded.sum() == 1 and (curation.clusters[curation.excluded] == -1).all()
    again = Curation.open(run)
    assert np.array_equal(again.clusters, curation.clusters) and again.names == curation.names
    assert [line["do"] for line in again.lines] == ["rename", "merge", "split", "move", "exclude"]
    assert again.lines[2]["rows"] == rows.tolist()
    lines = map(json.loads, (run / "curation.jsonl").read_text().splitlines())
    assert [line | {"undone": False} for line in lines] == again.lines


def test_checked_samples_stay_checked_when_they_move_and_not_after_an_undo(run, capsys):
    curation = Curation.open(run, by="anna")
    rows = members(curation, 1)
    line = curation.check(cluster=1)
    assert line["by"] == "anna" and line["rows"] == rows.tolist() and "cluster" not in line
    curation.move(rows[:2], 0)
    curation.by = None
    assert "by" not in curation.check(rows=[int(members(curation, 2)[0])])
    again = Curation.open(run)
    assert again.checked[rows].all() and again.checked.sum() == len(rows) + 1
    again.undo(line["id"])
    assert again.checked.sum() == 1
    assert [n.get("by") for n in again.lines] == ["anna", "anna", None, None]
    assert cli.main(["explore", str(run), "--undo", "--by", "bert"]) == 0
    assert "Undid decision" in capsys.readouterr().out
    assert Curation.open(run).lines[-1]["by"] == "bert"
    assert cli.main(["explore", str(run), "--undo", "--by", "a\tb"]) == 2
    assert "`by` is 'a\\tb'; expected one line" in capsys.readouterr().err
    for by in ("", "a\nb", "x" * 201):
        with pytest.raises(InputError, match="`by` is .*; expected one line of at most 200"):
            Curation.open(run, by=by)


def test_a_merged_cluster_keeps_the_first_name_or_gets_one(run):
    curation = Curation.open(run)
    curation.rename(1, "ones")
    curation.rename(2, "fours")
    curation.merge(np.array([2, 0]))
    assert curation.names == {0: "fours", 1: "ones"}
    curation.merge([0, 1], name="digits")
    assert curation.names == {0: "digits"} and set(curation.sizes) == {0}


def test_undo_and_redo_are_lines_too(run):
    curation = Curation.open(run)
    first = curation.rename(0, "zeros")
    before = curation.clusters
    merged = curation.merge([0, 1, 2])
    curation.undo()
    assert np.array_equal(curation.clusters, before) and curation.names == {0: "zeros"}
    assert [line["undone"] for line in curation.lines] == [False, True, False]
    second = curation.undo(first["id"])
    assert curation.names == {}
    with pytest.raises(InputError, match="no decision that could be undone"):
        curation.undo()
    curation.undo(second["id"])
    assert curation.names == {0: "zeros"}
    with pytest.raises(InputError, match="undone already"):
        curation.undo(merged["id"])
    with pytest.raises(InputError, match="the id 'x', which no earlier line has"):
        curation.undo("x")
    assert len((run / "curation.jsonl").read_text().splitlines()) == len(curation.lines) == 5


@pytest.mark.parametrize("seed", range(2))
def test_the_state_is_that_of_the_decisions_that_are_not_undone(run, tmp_path, photo_run, seed):
    rng, curation = np.random.default_rng(seed), Curation.open(run)
    n_refused = 0
    for _ in range(40):
        rows = np.unique(rng.integers(len(curation.clusters), size=3))
        clusters, ids = [*curation.sizes], [line["id"] for line in curation.lines]
        act, *args = [
            (curation.rename, rng.choice(clusters), f"n{rng.integers(5)}"),
            (curation.move, rows, [None, *clusters][rng.integers(len(clusters))]),
            (curation.merge, clusters[:2]),
            (curation.exclude, rows),
            *[(curation.undo, str(rng.choice(ids or [""])))] * 4,
        ][int(rng.integers(8))]
        try:
            act(*args)
        except InputError:
            n_refused += 1
    fresh = Curation.open(shutil.copytree(photo_run, tmp_path / "fresh"))
    held = [n for n in curation.lines if not n.pop("undone") and n["do"] != "undo"]
    given = tmp_path / "held.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in held))
    fresh.apply(given)
    for one in (curation, Curation.open(run)):
        assert np.array_equal(one.clusters, fresh.clusters) and one.names == fresh.names
        assert np.array_equal(one.excluded, fresh.excluded) and one.sizes == fresh.sizes
    assert n_refused and 5 < len(held) < len(curation.lines)


@fault(129)
def test_cluster_numbers_are_not_reused(run):
    curation = Curation.open(run)
    assert curation.split(0, members(curation, 0)[:3])["new"] == 1000
    curation.undo()
    again = curation.split(0, members(curation, 0)[:3])
    assert again["new"] == 1001
    renamed = curation.rename(1001, "three")
    with pytest.raises(InputError, match=rf"rename in line 4 \(id {renamed['id']}\) needs the"):
        curation.undo(again["id"])
    assert curation.names == {1001: "three"} and len(curation.lines) == 4


def test_a_cluster_is_split_along_the_tree(run):
    samples = Samples(run)
    curation = Curation.open(samples)
    decision = curation.split(1)
    level = samples.column(decision["level"])
    mine = samples.column("cluster") == 1
    assert len(np.unique(level[mine])) == len(decision["parts"]) + 1 > 1
    for part, new in decision["parts"]:
        assert np.array_equal(curation.clusters == new, mine & (level == part))
    sizes = curation.sizes
    assert sizes[1] >= max(sizes[new] for _, new in decision["parts"])
    curation.split(1, members(curation, 1)[1:])
    with pytest.raises(InputError, match="no level of the tree splits cluster 1: split"):
        curation.split(1)


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda c: c.check(), "check has the fields 'do'; expected rows or cluster"),
        (lambda c: c.check([1], cluster=1), "check has the fields .*; expected rows or cluster"),
        (lambda c: c.rename(7, "x"), "there is no cluster 7; expected one of 0, 1, 2"),
        (lambda c: c.rename(0, "a\nb"), "expected one line of at most 200"),
        (lambda c: c.merge([1, 1]), "expected two different numbers or more"),
        (lambda c: c.split(0, members(c, 1)[:2]), r"sample \d+ is not in cluster 0"),
        (lambda c: c.split(0, members(c, 0)), "all samples of cluster 0"),
        (lambda c: c.split(0, [0.5]), r"`rows` is a float64 array of shape \[1\]; expected"),
        (lambda c: c.split(0, []), "at least one"),
        (lambda c: c.move([10**6]), "there is no sample 1000000; expected numbers from 0 to"),
        (lambda c: c.move([-1]), r"`rows` is \[-1\]; expected numbers of samples"),
        (lambda c: c.rename(True, "x"), "`cluster` is True; expected a number"),
        (lambda c: c.rename(-1, "x"), "`cluster` is -1; expected a number, 0 or more"),
        (lambda c: c.move([0], 55), "there is no cluster 55"),
        (lambda c: c.move([0], 0, "x"), "move has the fields .*; expected .* or rows into"),
    ],
)
def test_an_invalid_decision_is_refused_and_nothing_written(run, decide, message):
    curation = Curation.open(run)
    with pytest.raises(InputError, match=message):
        decide(curation)
    assert curation.lines == [] and not (run / "curation.jsonl").exists()


def _changed(line, **changes):
    return json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda a, b: [a, b[:-20]], "line 2: the line is cut off"),
        (lambda a, b: [a[:-20], b, ""], "line 1: the line is damaged"),
        (lambda a, b: [a, b, a, ""], r"line 3: the id \w+ is the id of an earlier line"),
        (lambda a, b: [_changed(a, digest="0" * 16), ""], "the decision is about another run"),
        (lambda a, b: [_changed(b, new=1), ""], "line 1: a new cluster has the number 1;"),
        (lambda a, b: [_changed(b, new=10**12), ""], "a new cluster has the number 1000000000000"),
    ],
)
@fault(127)
def test_an_edited_file_is_refused_by_its_line(run, edit, message):
    curation = Curation.open(run)
    curation.rename(0, "zeros")
    curation.split(0, members(curation, 0)[:3])
    file = run / "curation.jsonl"
    file.write_text("\n".join(edit(*file.read_text().splitlines())))
    damaged = file.read_bytes()
    with pytest.raises(CorruptFileError, match=message) as error:
        Curation.open(run)
    assert "curation.jsonl, line" in str(error.value) and "Delete that line" in str(error.value)
    with pytest.raises(CorruptFileError):
        curation.rename(1, "x")
    assert file.read_bytes() == damaged


def _with(**changes):
    return lambda line: _changed(line, **changes).encode()


def _tree(**changes):
    """Replace a line by one that splits by the tree."""
    tree = {"do": "split", "level": "level_4", "parts": [[1, 1000]]} | changes
    return lambda line: json.dumps(
        {key: value for key, value in json.loads(line).items() if key != "name"} | tree
    ).encode()


HOSTILE = {
    "an unknown field": (_with(__proto__=1), "rename has the fields"),
    "true as a number": (_with(cluster=True), "`cluster` is True; expected a number"),
    "an unknown cluster": (_with(cluster=7), "there is no cluster 7"),
    "a name that clears the screen": (_with(name="\x1b[2J"), "`name` is .*; expected one line"),
    "an unknown decision": (_with(do=["rename"]), r"`do` is \['rename'\]; expected one of rename"),
    "an id with a line break": (_with(id="0" * 12 + "\n"), "`id` is .*; expected 12 hex"),
    "markup as a time": (_with(time="<b>"), "`time` is '<b>'; expected a UTC time"),
    "some of the samples": (_with(samples=7), "about another run"),
    "parts of three": (_tree(parts=[[1, 2, 3]]), "`parts` is .*; expected pairs"),
    "a level that is a column": (_tree(level="file"), "has the tree level 'file'; expected"),
    "parts that do not exist": (_tree(parts=[[99, 1000]]), "moves the parts .99. of level_4;"),
    "a part twice": (_tree(parts=[[1, 1000], [1, 1001]]), "expected some, but not all, of"),
    "deep brackets": (lambda a: b"[" * 100_000, "the line is damaged .it is nested too deeply"),
    "a number of 5,000 digits": (lambda a: b"[" + b"9" * 5000 + b"]", "damaged .Exceeds"),
    "NaN": (lambda a: a.replace(b'"cluster": 0', b'"cluster": NaN'), "NaN is not valid JSON"),
    "a key twice": (lambda a: a.replace(b"{", b'{"cluster": 1, ', 1), "a key occurs twice"),
    "invalid UTF-8": (lambda a: a.replace(b"zeros", b"\xff"), "is damaged .'utf-8' codec"),
    "nothing": (lambda a: b"", "the line is damaged"),
    "null": (lambda a: b"null", "a decision is None; expected a JSON object"),
}


@pytest.mark.parametrize(("edit", "message"), HOSTILE.values(), ids=HOSTILE.keys())
@fault(155)
def test_a_decision_line_is_validated_before_it_is_added(run, tmp_path, edit, message):
    curation = Curation.open(run)
    curation.rename(0, "zeros")
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    curation.path.rename(good)
    line = good.read_bytes().rstrip(b"\n")
    sound = _with(id="0" * 12, name="another")(line)
    bad.write_bytes(sound + b"\n" + edit(line) + b"\n")
    with pytest.raises(CorruptFileError, match=message) as error:
        Curation.open(run).apply(bad)
    text = str(error.value)
    assert text.startswith(f"{bad}, line 2: ") and "\n" not in text and len(text) < 500
    assert not curation.path.exists()  # the first line was not taken either
    applied = Curation.open(run).apply(good)[0]
    assert (applied["cluster"], applied["name"]) == (0, "zeros")


def _accepts(check, *arguments, **options):
    try:
        check(*arguments, **options)
    except (ValueError, InputError):
        return False
    return True


def test_every_line_fits_the_schema_and_what_is_refused_does_not(run):
    jsonschema = pytest.importorskip("jsonschema")
    curation = Curation.open(run, by="anna")
    curation.rename(0, "zeros")
    curation.merge([1, 2], name="rest")
    curation.split(1)
    curation.split(1, members(curation, 1)[:1], name="one")
    curation.move([0, 3])
    curation.move([4], 0)
    curation.exclude([5])
    curation.check(cluster=0)
    curation.undo()
    lines = curation.path.read_text().splitlines()
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    assert all(validator.is_valid(json.loads(line)) for line in lines)
    assert {json.loads(line)["do"] for line in lines} == set(line_format.FORMS)
    edited = [edit(lines[0].encode()) for edit, _ in HOSTILE.values()]
    for line in map(json.loads, lines):
        for key in line:
            edited.append(json.dumps({k: v for k, v in line.items() if k != key}).encode())
            for value in (None, True, "", "x" * 201, "a\n", [], [1, 1], [[1]], 2**53):
                edited.append(json.dumps(line | {key: value}).encode())
    parsed = [files.strict_json(text) for text in edited if _accepts(files.strict_json, text)]
    accepted = [_accepts(line_format.check_line, line) for line in parsed]
    assert accepted == [validator.is_valid(line) for line in parsed] and 10 < sum(accepted) < 100
    request = jsonschema.Draft202012Validator(schema(is_request=True))
    for asked in ({"do": "check", "cluster": 3, "by": "b"}, {"do": "move", "rows": [1], "new": 5}):
        is_fine = _accepts(line_format.check_line, asked, is_request=True)
        assert request.is_valid(asked) is is_fine is (asked["do"] == "check")


@fault(155)
def test_large_cluster_numbers_are_refused(run, tmp_path):
    curation = Curation.open(run)
    curation.move([3], name="mine")
    curation.undo()
    line = json.loads((run / "curation.jsonl").read_text().splitlines()[0])
    given = tmp_path / "given.jsonl"
    for new in (1000, 2001, 9_999_999):  # the first was used, though undone; others jump
        given.write_text(_changed(json.dumps(line), id="0" * 12, new=new) + "\n")
        with pytest.raises(CorruptFileError, match=f"number {new}; expected a number below 2001"):
            curation.apply(given)
    given.write_text(_changed(json.dumps(line), id="0" * 12, new=1500) + "\n")
    assert curation.apply(given)[0]["new"] == 1500
    assert curation.move([4])["new"] == 1501
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["dataset"]["n_clusters"] = 950  # an extension adds clusters: numbers in use stay valid
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert Curation.open(run).names == curation.names


@fault(155)
def test_only_regular_files_of_a_sensible_size_are_read(run, tmp_path):
    curation = Curation.open(run)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    for name in ("pipe", "zero", "huge"):
        with pytest.raises(InputError, match=f"{name} is not a file of decisions; expected"):
            curation.apply(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        curation.apply(tmp_path / "nowhere")


def test_decisions_of_another_file_are_added_once(run, photo_run, tmp_path):
    other = Curation.open(shutil.copytree(photo_run, tmp_path / "other"))
    other.rename(0, "zeros")
    other.merge([1, 2])
    curation = Curation.open(run)
    assert [line["do"] for line in curation.apply(other.path)] == ["rename", "merge"]
    assert curation.apply(other.path) == [] and curation.names == {0: "zeros"}
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(other.path.read_bytes().replace(b"\n", b"\r\n"))
    assert curation.apply(windows) == []
    assert curation.path.read_bytes() == other.path.read_bytes()
    other.rename(0, "nought")
    curation.merge([0, 1])
    curation.move(members(curation, 0)[:1])
    other.split(1, members(other, 1)[:1])  # with the number that curation used meanwhile
    before = curation.path.read_bytes()
    with pytest.raises(CorruptFileError, match=r"other/curation.jsonl, line 4: a new cluster"):
        curation.apply(other.path)
    assert curation.path.read_bytes() == before and curation.names == {0: "zeros"}


def test_decisions_outlive_an_extension(run):
    curation = Curation.open(run)
    curation.split(0, members(curation, 0)[:3], name="three")
    file = run / "assignments.csv"
    more = [line.replace(",test,", ",extend1,") for line in file.read_text().splitlines()[-5:]]
    file.write_text(file.read_text() + "\n".join(more) + "\n")
    again = Curation.open(run)
    assert len(again.clusters) == len(curation.clusters) + 5 and again.sizes[1000] == 3
    lines = file.read_text().splitlines()
    lines[1] = lines[1].replace("0000.png", "elsewhere.png")
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(CorruptFileError, match="about another run than .* or the assignments of"):
        Curation.open(run)


def _decide_in_threads(run, cluster):
    """Four threads decide, as tabs of a page do, one reads and sees complete states only."""
    curation = Curation.open(run)

    def rename(tab):
        for number in range(8):
            curation.rename(cluster, f"{number} of tab {tab} of {cluster}")

    def read():
        for _ in range(8):
            count = len(curation.lines)
            assert len(curation.lines) >= count and curation.names is not None

    with ThreadPoolExecutor(5) as pool:
        work = [*(pool.submit(rename, tab) for tab in range(4)), pool.submit(read)]
    os._exit(sum(future.exception() is not None for future in work))


@fault(128)
def test_threads_and_processes_at_once_lose_no_decision(run, monkeypatch):
    write = files.atomic_write_bytes

    def slow(path, data):  # between the rename and what follows it
        write(path, data)
        time.sleep(0.002)

    monkeypatch.setattr(module, "atomic_write_bytes", slow)
    monkeypatch.setattr(module, "WAIT", 100.0)  # seconds; the other process may hold the lock often
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_decide_in_threads, args=(run, k)) for k in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(Curation.open(run).lines) == 2 * 4 * 8


@fault(159)
def test_the_temporary_file_of_a_killed_writer_is_removed_and_no_other(run):
    orphan = run / ".curation.jsonl.0123abcd.tmp"
    others = [run / ".curation.jsonl.mine.tmp", run / "curation.jsonl.0123abcd.tmp"]
    alive = files._open_temporary(run / "curation.jsonl")
    for path in (orphan, *others):
        path.write_bytes(b"half a li")
    Curation.open(run)
    assert not orphan.exists() and all(path.exists() for path in (*others, Path(alive.name)))
    alive.close()
    Curation.open(run)
    assert not Path(alive.name).exists()


def test_a_locked_file_is_waited_for(run, monkeypatch):
    monkeypatch.setattr(module, "WAIT", 0.1)
    curation = Curation.open(run)
    with Lock(run / ".curation.lock"), pytest.raises(LockHeld):
        curation.rename(0, "zeros")
    assert curation.rename(0, "zeros")["name"] == "zeros"
