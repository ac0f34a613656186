"""Decisions about clusters: each a line of a file that is read, undone and applied again."""

import json
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ssl_kd import files
from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError
from ssl_kd.files.lock import Lock, LockHeld
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.finished import Curation, decided
from ssl_kd.workbench.finished import curation as module
from ssl_kd.workbench.finished.decided import Clusters
from tests.faults.matrix import row as fault


@pytest.fixture
def run(photo_run, tmp_path):
    """A copy of the run's folder, for decisions of its own."""
    return shutil.copytree(photo_run, tmp_path / "copy")


def members(curation, cluster):
    return np.flatnonzero(curation.clusters == cluster)


def test_without_a_decision_it_is_the_run(run):
    samples = Samples(run)
    curation = Curation.open(samples)
    assert np.array_equal(curation.clusters, samples.column("cluster"))
    assert curation.names == {} and curation.history == [] and not curation.excluded.any()
    assert sum(curation.sizes.values()) == len(samples)
    assert not (run / "curation.jsonl").exists()


def test_rename_merge_split_move_exclude_and_read_again(run):
    curation = Curation.open(run)
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
    assert [line.do for line in again.history] == ["rename", "merge", "split", "move", "exclude"]
    assert again.history[2].what["rows"] == rows.tolist() and again.history[2].line == 3
    lines = (run / "curation.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [line.id for line in again.history]


def test_a_merged_cluster_keeps_the_first_name_or_gets_one(run):
    curation = Curation.open(run)
    curation.rename(1, "ones")
    curation.rename(2, "fours")
    curation.merge([0, 2])
    assert curation.names == {0: "fours", 1: "ones"}
    curation.merge([0, 1], name="digits")
    assert curation.names == {0: "digits"} and set(curation.sizes) == {0}


def test_undo_and_redo_are_lines_too(run):
    curation = Curation.open(run)
    first = curation.rename(0, "zeros")
    before = curation.clusters
    curation.merge([0, 1, 2])
    undone = curation.undo()
    assert np.array_equal(curation.clusters, before) and curation.names == {0: "zeros"}
    assert [line.undone for line in curation.history] == [False, True, False]
    second = curation.undo(first.id)
    assert curation.names == {}
    with pytest.raises(InputError, match="no decision that could be undone"):
        curation.undo()
    curation.undo(second.id)
    assert curation.names == {0: "zeros"}
    with pytest.raises(InputError, match="undone already"):
        curation.undo(undone.what["of"])
    with pytest.raises(InputError, match="no decision before it has the id 'x'"):
        curation.undo("x")
    assert len((run / "curation.jsonl").read_text().splitlines()) == len(curation.history) == 5


def held(lines):
    """The decisions that hold, found from the last line to the first."""
    found, undone = [], set()
    for line in reversed(lines):
        if line["id"] not in undone:
            found.append(line)
            undone |= {line["of"]} if line["do"] == "undo" else set()
    return [line for line in reversed(found) if line["do"] != "undo"]


def followed(samples, lines):
    """The clusters after these decisions, each followed once; None where one cannot be."""
    state = Clusters(samples)
    try:
        for line in lines:
            state.follow(line)
    except InputError:
        return None
    return state


@pytest.mark.parametrize("kept", [1 << 24, 5], ids=["kept", "not kept"])
@pytest.mark.parametrize("seed", range(3))
def test_an_undo_leaves_what_following_all_others_leaves(run, monkeypatch, kept, seed):
    monkeypatch.setattr(decided, "MOST_KEPT", kept)
    samples, rng = Samples(run), np.random.default_rng(seed)
    state, refused = Clusters(samples), 0
    for number in range(150):
        k, *rows = (int(i) for i in rng.integers([5, *[len(samples)] * 3]))
        there = list(state.sizes())
        new = {"new": max(1000, state.last_made + 1)} if k % 2 else {"into": there[k % len(there)]}
        of = state.lines[int(rng.integers(len(state.lines)))]["id"] if state.lines else ""
        undo, new_rows = {"do": "undo", "of": of}, sorted({*rows})
        asked = [
            {"do": "rename", "cluster": there[k % len(there)], "name": f"n{k}"},
            {"do": "move", "rows": new_rows, **new},
            {"do": "merge", "clusters": there[:2]},
            {"do": "exclude", "rows": new_rows},
            *[undo] * 6,
        ][int(rng.integers(10))]
        line = {"id": f"{number:012x}", "samples": len(samples), **asked}
        after, expected = state.copy(), followed(samples, held([*state.lines, line]))
        possible = asked["do"] != "undo" or (of in state.numbers and not state.undos[of])
        if expected is None or not possible:
            refused += 1
            with pytest.raises(InputError):
                after.follow(line)
            continue
        after.follow(line)
        state = after
        assert np.array_equal(state.clusters, expected.clusters)
        assert np.array_equal(state.excluded, expected.excluded)
        assert state.names == expected.names and state.sizes() == expected.sizes()
        assert [n for n in state.lines if state.is_undone(n) or n["do"] == "undo"] == [
            n for n in state.lines if n not in held(state.lines)
        ]
    assert refused > 5 and len(state.lines) > 80


def test_undoing_the_last_decisions_one_by_one_follows_none_again(run, monkeypatch):
    samples, done = Samples(run), []
    do = Clusters._do
    monkeypatch.setattr(Clusters, "_do", lambda *given: done.append(do(*given)))
    state = Clusters(samples)
    for n in range(300):
        about = {"id": f"{n:012x}", "samples": len(samples)}
        state.follow({**about, "do": "rename", "cluster": n % 3, "name": f"n{n}"})
    for n in range(299, -1, -1):
        state.follow({"id": f"{n + 300:012x}", "do": "undo", "of": f"{n:012x}"})
    assert len(done) == 300 and state.names == {}


@fault(129)
def test_a_number_is_never_used_twice_and_what_others_stand_on_stays(run):
    curation = Curation.open(run)
    split = curation.split(0, members(curation, 0)[:3])
    curation.undo()
    assert curation.split(0, members(curation, 0)[:3]).what["new"] == 1001
    again = curation.history[-1]
    renamed = curation.rename(1001, "three")
    with pytest.raises(InputError, match=rf"rename in line 4 \(id {renamed.id}\) stands on it"):
        curation.undo(again.id)
    assert curation.names == {1001: "three"} and split.what["new"] == 1000


def test_a_cluster_is_split_as_the_tree_does(run):
    samples = Samples(run)
    curation = Curation.open(samples)
    decision = curation.split(1)
    level = samples.column(decision.what["level"])
    mine = samples.column("cluster") == 1
    assert len(np.unique(level[mine])) == len(decision.what["parts"]) + 1 > 1
    for part, new in decision.what["parts"]:
        assert np.array_equal(curation.clusters == new, mine & (level == part))
    sizes = curation.sizes
    assert sizes[1] >= max(sizes[new] for _, new in decision.what["parts"])
    curation.split(1, members(curation, 1)[1:])
    with pytest.raises(InputError, match="no level of the tree parts cluster 1: select"):
        curation.split(1)


@pytest.mark.parametrize(
    ("decide", "said"),
    [
        (lambda c: c.rename(7, "x"), r"there is no cluster 7 \(any more\), only 0, 1, 2"),
        (lambda c: c.rename(0, "a\nb"), "expected one line of at most 200"),
        (lambda c: c.merge([1, 1]), "expected two or more to merge"),
        (lambda c: c.split(0, members(c, 1)[:2]), r"sample \d+ is not in cluster 0"),
        (lambda c: c.split(0, members(c, 0)), "all of cluster 0"),
        (lambda c: c.split(0, [0.5]), r"rows are float64 \[1\]; expected numbers"),
        (lambda c: c.split(0, []), "at least one"),
        (lambda c: c.move([10**6]), "there is no sample 1000000; expected 0 to"),
        (lambda c: c.move([-1]), r"rows: expected numbers of samples, .* not \[-1\]"),
        (lambda c: c.rename(True, "x"), "True.* is no cluster's number"),
        (lambda c: c.rename("0", "x"), "'0' is no cluster's number"),
        (lambda c: c.merge([0, 1.0]), "1.0 is no cluster's number"),
        (lambda c: c.move([0], np.bool_(True)), "True.* is no cluster's number"),
        (lambda c: c.rename(-1, "x"), "cluster: expected a number, 0 or more, not -1"),
        (lambda c: c.rename(0, 5), "name: expected one line of at most 200 characters, not 5"),
        (lambda c: c.rename(0, "\ud800"), "name: expected one line"),
        (lambda c: c.move([0], 55), "there is no cluster 55"),
        (lambda c: c.move([0], 0, "zeros"), "rename it to call it 'zeros'"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(run, decide, said):
    curation = Curation.open(run)
    with pytest.raises(InputError, match=said):
        decide(curation)
    assert curation.history == [] and not (run / "curation.jsonl").exists()


def _changed(line, **changes):
    return json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda a, b: [a, b[:-20]], r"line 2: it is cut off"),
        (lambda a, b: [a[:-20], b, ""], r"line 1: it is damaged"),
        (lambda a, b: ["[1]", ""], r"line 1: it is \[1\]; expected an object"),
        (lambda a, b: [a, b], "line 2: it is cut off .no end of line"),
        (lambda a, b: [a, b, a, ""], r"line 3: the id \w+ is that of an earlier line"),
        (lambda a, b: [_changed(a, digest="0" * 16), ""], "line 1: it is about another run"),
        (lambda a, b: [_changed(a, samples=10**9), ""], "line 1: it is about another run"),
        (lambda a, b: [_changed(a, cluster=44), ""], "line 1: there is no cluster 44"),
        (lambda a, b: [_changed(a, do="dance"), ""], "line 1: 'dance' is no decision"),
        (
            lambda a, b: [_changed(a, name=None), ""],
            "line 1: name: expected one line of .* not None",
        ),
        (lambda a, b: [_changed(b, rows=["x"]), ""], "line 1: rows: expected numbers"),
        (lambda a, b: [_changed(b, new=1), ""], "line 1: a new cluster cannot have the number 1"),
        (lambda a, b: [_changed(b, new=10**12), ""], "cannot have the number 1000000000000"),
        (lambda a, b: [_changed(a, do="undo", of=[]), ""], r"undo does not say .*; expected of\."),
        (lambda a, b: [_changed(a, do="merge"), ""], r"line 1: merge does not say what it should"),
        (lambda a, b: [_changed(a, parts=5), ""], "line 1: rename does not say what it should"),
    ],
)
@fault(127)
def test_an_edited_file_is_refused_by_its_line(run, edit, said):
    curation = Curation.open(run)
    curation.rename(0, "zeros")
    curation.split(0, members(curation, 0)[:3])
    file = run / "curation.jsonl"
    file.write_text("\n".join(edit(*file.read_text().splitlines())))
    damaged = file.read_bytes()
    with pytest.raises(CorruptFileError, match=said) as error:
        Curation.open(run)
    assert "curation.jsonl, line" in str(error.value) and "Delete that line" in str(error.value)
    with pytest.raises(CorruptFileError):
        curation.rename(1, "x")
    assert file.read_bytes() == damaged


def _tree(line, **changes):
    """A line that splits as the tree does, instead of another."""
    tree = {"do": "split", "level": "level_2", "parts": [[1, 1000]]} | changes
    return json.dumps({k: v for k, v in json.loads(line).items() if k != "name"} | tree).encode()


def _with(**changes):
    return lambda line: json.dumps(json.loads(line) | changes).encode()


HOSTILE = {
    "parts of a rename": (_with(parts=5), "rename does not say what it should"),
    "a key that nobody knows": (_with(__proto__=1), "rename does not say what it should"),
    "a new number of a rename": (_with(new=5), "rename does not say"),
    "true is no number": (_with(cluster=True), "cluster: expected a number, 0 or more, not True"),
    "text is no number": (_with(cluster="0"), "not '0'"),
    "text with a nought": (_with(cluster="01"), "not '01'"),
    "1.0 is no number": (_with(cluster=1.0), "not 1.0"),
    "below zero": (_with(cluster=-1), "not -1"),
    "beyond all numbers": (_with(cluster=2**53), "not 9007199254740992"),
    "no number": (_with(cluster=None), "not None"),
    "a list": (_with(cluster=[0]), r"not \[0\]"),
    "a cluster that is not there": (_with(cluster=7), "there is no cluster 7"),
    "a long name": (_with(name="x" * 201), "name: expected one line of at most 200"),
    "a name of two lines": (_with(name="a\nb"), "name: expected one line"),
    "a name that clears the screen": (_with(name="\x1b[2J"), "name: expected one line"),
    "half a character": (_with(name="\ud800"), "name: expected one line"),
    "a decision of no kind": (_with(do=["rename"]), r"\['rename'\] is no decision"),
    "an id of another kind": (_with(id="x"), "id: expected 12 hexadecimal digits"),
    "an id of other digits": (_with(id="\u0663" * 12), "id: expected 12 hexadecimal digits"),
    "an id with a break": (_with(id="0" * 12 + "\n"), "id: expected 12 hexadecimal digits"),
    "a time that is markup": (_with(time="<b>"), "time: expected as 2026"),
    "no samples": (_with(samples=0), "about another run"),
    "some of the samples": (_with(samples=7), "about another run"),
    "true samples": (_with(samples=True), "samples: expected a number"),
    "parts that are none": (lambda a: _tree(a, parts=5), "parts: expected pairs"),
    "no parts": (lambda a: _tree(a, parts=[]), "parts: expected pairs"),
    "parts of three": (lambda a: _tree(a, parts=[[1, 2, 3]]), "parts: expected pairs"),
    "parts that are true": (lambda a: _tree(a, parts=[[True, 1000]]), "parts: expected pairs"),
    "a level that is a column": (lambda a: _tree(a, level="file"), "no level 'file'"),
    "deep brackets": (lambda a: b"[" * 100_000, "it is damaged .it is nested too deeply"),
    "deep objects": (lambda a: b'{"a":' * 100_000, "it is nested too deeply"),
    "a number of 5,000 digits": (lambda a: b"[" + b"9" * 5000 + b"]", "it is damaged .Exceeds"),
    "a number of 4,000 digits": (
        lambda a: a.replace(b'"cluster": 0', b'"cluster": ' + b"9" * 4000),
        "cluster: expected a number",
    ),
    "NaN": (lambda a: a.replace(b'"cluster": 0', b'"cluster": NaN'), "NaN is not a number"),
    "a key twice": (lambda a: a.replace(b"{", b'{"cluster": 1, ', 1), "a key stands there twice"),
    "invalid UTF-8": (lambda a: a.replace(b"zeros", b"\xff\xfe"), "it is damaged .'utf-8' codec"),
    "UTF-16": (lambda a: a.decode().encode("utf-16"), "it is damaged .'utf-8' codec"),
    "a byte order mark": (lambda a: b"\xef\xbb\xbf" + a, "it is damaged .Unexpected UTF-8 BOM"),
    "nothing": (lambda a: b"", "it is damaged"),
    "NUL": (lambda a: b"\0", "it is damaged"),
    "null": (lambda a: b"null", "it is None; expected an object"),
}


@pytest.mark.parametrize(("edit", "said"), HOSTILE.values(), ids=HOSTILE.keys())
@fault(155)
def test_a_visitor_s_line_is_checked_whole_and_blocks_no_run(run, tmp_path, edit, said):
    curation = Curation.open(run)
    curation.rename(0, "zeros")
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    curation.path.rename(good)
    line = good.read_bytes().rstrip(b"\n")
    sound = _with(id="0" * 12, name="another")(line)
    bad.write_bytes(sound + b"\n" + edit(line) + b"\n")
    with pytest.raises(CorruptFileError, match=said) as error:
        Curation.open(run).apply(bad)
    message = str(error.value)
    assert message.startswith(f"{bad}, line 2: ") and "\n" not in message and len(message) < 500
    assert not curation.path.exists()  # the first line was not taken either
    assert Curation.open(run).apply(good)[0].what == {"cluster": 0, "name": "zeros"}
    if edit(line) != b"":
        bad.rename(curation.path)  # as an earlier version took it: the way out is named
        with pytest.raises(CorruptFileError, match="curation.jsonl, line 2: .* Delete that line"):
            Curation.open(run)
        curation.path.write_bytes(sound + b"\n")
        assert Curation.open(run).names == {0: "another"}


@fault(155)
def test_a_visitor_s_number_leaves_room_for_those_of_others(run, tmp_path):
    curation = Curation.open(run)
    curation.move([3], name="mine")
    curation.undo()
    line = json.loads((run / "curation.jsonl").read_text().splitlines()[0])
    given = tmp_path / "given.jsonl"
    for new in (1000, 2001, 9_999_999):  # one was given, and is undone; others jump
        given.write_text(json.dumps(line | {"id": "0" * 12, "new": new}) + "\n")
        with pytest.raises(CorruptFileError, match=f"number {new}: expected one below 2001"):
            curation.apply(given)
    given.write_text(json.dumps(line | {"id": "0" * 12, "new": 1500}) + "\n")
    assert curation.apply(given)[0].what["new"] == 1500
    assert curation.move([4]).what["new"] == 1501
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["dataset"]["n_clusters"] = 950  # an extension offers more: what was given stays
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert Curation.open(run).names == curation.names


def test_rows_that_come_twice_are_refused_as_the_page_counts_them(run, tmp_path):
    curation = Curation.open(run)
    curation.exclude([3, 4])
    copy = tmp_path / "twice.jsonl"
    curation.path.rename(copy)
    line = copy.read_text()
    copy.write_text(line.replace("[3, 4]", "[3, 4, 3]"))
    with pytest.raises(CorruptFileError, match="each once, not"):
        Curation.open(run).apply(copy)
    copy.write_text(line.replace("\n", "\r\n"))  # Windows ends lines so: JSON passes over it
    assert Curation.open(run).apply(copy)[0].do == "exclude"


@fault(155)
def test_what_is_no_file_of_decisions_is_not_read_for_ever(run, tmp_path):
    curation = Curation.open(run)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    for name in ("pipe", "zero", "huge"):
        with pytest.raises(InputError, match=f"{name} is no file of decisions; expected a regular"):
            curation.apply(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        curation.apply(tmp_path / "nowhere")


def test_decisions_of_another_file_are_added_once(run, photo_run, tmp_path):
    other = Curation.open(shutil.copytree(photo_run, tmp_path / "other"))
    other.rename(0, "zeros")
    other.merge([1, 2])
    curation = Curation.open(run)
    assert [line.do for line in curation.apply(other.path)] == ["rename", "merge"]
    assert curation.apply(other.path) == [] and curation.names == {0: "zeros"}
    assert curation.path.read_bytes() == other.path.read_bytes()
    other.rename(0, "nought")
    curation.merge([0, 1])
    curation.move(members(curation, 0)[:1])
    other.split(1, members(other, 1)[:1])  # of the number that curation gave by now
    before = curation.path.read_bytes()
    with pytest.raises(CorruptFileError, match=r"other/curation.jsonl, line 4: there is no clus"):
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
    with pytest.raises(CorruptFileError, match="about another run than .* or its assignments were"):
        Curation.open(run)


def test_two_programs_decide_at_once_and_see_each_other(run):
    one, two = Curation.open(run), Curation.open(run)
    one.rename(0, "zeros")
    two.rename(1, "ones")
    assert two.names == {0: "zeros", 1: "ones"}
    assert one.undo().what == {"of": two.history[-1].id} and one.names == {0: "zeros"}


def _rename_often(run, cluster):
    curation = Curation.open(run)
    for number in range(5):
        curation.rename(cluster, f"name {number} of {cluster}")


@fault(128)
def test_processes_lose_no_line(run):
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_rename_often, args=(run, k)) for k in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        if worker.is_alive():
            worker.kill()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(Curation.open(run).history) == 10


def _decide_in_threads(run, cluster):
    """Many tabs of one page: some decide, others read; each answer must be whole."""
    curation, faults = Curation.open(run), []

    def watched(act):
        def work():
            try:
                for number in range(8):
                    act(number)
            except BaseException as error:
                faults.append(repr(error))

        return work

    def tell(tab):
        return lambda n: curation.rename(cluster, f"{n} of tab {tab} of {cluster}")

    def read(_):
        count = len(curation.lines)
        assert len(curation.history) >= count and curation.names is not None

    acts = [*map(tell, range(4)), read, read]
    threads = [threading.Thread(target=watched(act)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(len(faults))


@fault(128)
def test_tabs_and_processes_at_once_lose_no_decision(run, monkeypatch):
    real = files.atomic_write_bytes

    def slow(path, data):  # between the rename and what `_add` does next
        real(path, data)
        time.sleep(0.002)

    monkeypatch.setattr(module, "atomic_write_bytes", slow)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_decide_in_threads, args=(run, k)) for k in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(Curation.open(run).history) == 2 * 4 * 8


@fault(159)
def test_what_a_killed_writer_left_is_gone_after_the_next_start_and_nothing_else(run):
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


def test_a_file_that_another_holds_is_waited_for(run, monkeypatch):
    monkeypatch.setattr(module, "WAIT", 0.1)
    curation = Curation.open(run)
    with Lock(run / ".curation.lock"), pytest.raises(LockHeld):
        curation.rename(0, "zeros")
    assert curation.rename(0, "zeros").line == 1
