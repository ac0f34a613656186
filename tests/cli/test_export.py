"""`ssl_kd export`: what it prints, and one line for what cannot be."""

import json
import shutil
import subprocess
import sys

import pytest
from pyarrow import parquet

from ssl_kd import cli
from ssl_kd.workbench.naming import Names
from tests.faults.matrix import row as fault


@pytest.fixture
def copied(photo_run, tmp_path):
    return shutil.copytree(photo_run, tmp_path / "run")


def test_names_and_a_selection_in_one_command(copied, tmp_path, capsys):
    lines = [line.split(",") for line in (copied / "assignments.csv").read_text().splitlines()[1:]]
    says = {"digit 0": "a ring", "digit 1": "one stroke", "digit 4": "an open fork"}
    captions = tmp_path / "captions.csv"
    rows = [f"{line[0]},{line[3]},picture of {says[line[4]]}" for line in lines]
    captions.write_text("\n".join(["file,split,caption", *rows]) + "\n")
    out = tmp_path / "some.parquet"
    argv = [str(copied), "--to", "parquet", "--names", str(captions), "--split", "test"]
    assert cli.main(["export", *argv, "--clusters", "0,1", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert f"parquet: {out}" in told and "read_parquet" in told and "names.json" in told
    names = Names.load(copied)
    table = parquet.read_table(out)
    assert set(table.column("cluster").to_pylist()) == {0, 1}
    assert set(table.column("cluster_name").to_pylist()) == {names.of("cluster", c) for c in (0, 1)}
    assert not {"0", "1"} & set(table.column("cluster_name").to_pylist())


def test_columns_of_a_table_go_out(copied, tmp_path):
    n = len((copied / "assignments.csv").read_text().splitlines()) - 1
    more = tmp_path / "map.csv"
    more.write_text("\n".join(["x,y", *(f"{i},{i / 2}" for i in range(n))]) + "\n")
    argv = ["export", str(copied), "--to", "parquet", "--columns", str(more)]
    assert cli.main(argv) == 0
    table = parquet.read_table(copied / "export" / "clusters.parquet")
    assert table.column("y").to_pylist() == [i / 2 for i in range(n)]
    assert cli.main(argv) == 2  # it is there


@fault(173)
def test_force_replaces_a_file_once_the_new_one_is_whole_and_nothing_else(copied, tmp_path, capsys):
    out = tmp_path / "out.parquet"
    argv = ["export", str(copied), "--to", "parquet", "--out", str(out)]
    out.write_text("mine")
    assert cli.main(argv) == 2 and "replace it by --force" in capsys.readouterr().err
    table = tmp_path / "short.csv"
    table.write_text("more\n1\n")
    assert cli.main([*argv, "--force", "--columns", str(table)]) == 2  # too short: found out late
    assert out.read_text() == "mine"
    assert cli.main([*argv, "--force"]) == 0
    assert parquet.read_table(out).num_rows > 100
    out.unlink()
    out.mkdir()
    (out / "thesis.txt").write_text("all of it")
    for to, place in (("parquet", out), ("fiftyone", out), ("folders", out), ("hf-model", out)):
        assert cli.main(["export", str(copied), "--to", to, "--out", str(place), "--force"]) == 2
    assert (out / "thesis.txt").read_text() == "all of it"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.parquet", "run", "short.csv"]


@fault(173)
def test_what_needs_no_torch_is_refused_before_torch_is_imported(copied, tmp_path):
    (tmp_path / "there.parquet").write_text("mine")
    program = (
        "import sys; from ssl_kd.cli import main\n"
        "for argv in [\n"
        f"    ['--to', 'parquet', '--out', {str(tmp_path / 'there.parquet')!r}],\n"
        "    ['--to', 'parquet', '--out', 'a\\0b.parquet'],\n"
        "    ['--to', 'parquet', '--out', 'x.csv'], ['--to', 'parkit'], ['--names', 'no.csv'],\n"
        "    ['--to', 'parquet', '--link', 'copy'], ['--to', 'folders', '--columns', 'no.csv'],\n"
        "]:\n"
        f"    assert main(['export', {str(copied)!r}, *argv]) == 2, argv\n"
        "assert main(['export', 'nowhere', '--to', 'parquet']) == 2\n"
        "assert not {'torch', 'pyarrow', 'sklearn'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 8


@fault(173)
@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("cluster_name", "the run has a column 'cluster_name' already"),
        ("cluster_of_run", "the run has a column 'cluster_of_run' already"),
        ("file", "the run has a column 'file' already"),
        ("x,y,x", "has the column 'x' twice"),
        (",", "has the column '' twice"),
    ],
)
def test_a_column_that_would_take_anothers_place_is_refused(copied, tmp_path, capsys, header, told):
    n = len((copied / "assignments.csv").read_text().splitlines()) - 1
    more = tmp_path / "more.csv"
    cells = ",".join("7" for _ in header.split(","))
    more.write_text("\n".join([header, *[cells] * n]) + "\n")
    out = tmp_path / "out.parquet"
    argv = ["export", str(copied), "--to", "parquet", "--columns", str(more), "--out", str(out)]
    assert cli.main(argv) == 2 and told in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--to", "parket"], "--to is 'parket', not parquet, folders, .*Did you mean parquet"),
        ([], "--to is required"),
        (["--to", "parquet", "--cluster", "1"], "There is no flag --cluster"),
        (["--to", "parquet", "--clusters", "one"], "--clusters has 'one', expected numbers"),
        (["--to", "parquet", "--clusters", "9"], "no cluster 9"),
        (["--to", "parquet", "--split", "valid"], "no split 'valid', only train, test"),
        (["--to", "parquet", "--link", "copy"], "parquet does not take --link"),
        (["--to", "parquet", "--columns", "gone.csv"], "gone.csv"),
        (["--names", "gone.csv"], "there is no file gone.csv"),
    ],
)
def test_what_cannot_be_is_one_line(photo_run, capsys, argv, told):
    import re

    assert cli.main(["export", str(photo_run), *argv]) == 2
    error = capsys.readouterr().err
    assert re.search(told, error) and len(error.splitlines()) == 1, error
    assert not (photo_run / "export").exists()


def test_what_is_no_run(copied, tmp_path, capsys):
    assert cli.main(["export", "--to", "parquet"]) == 2
    assert "takes the run first" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), "--to", "parquet"]) == 2
    assert "is not a run's folder" in capsys.readouterr().err
    lines = (copied / "assignments.csv").read_text().splitlines()
    (copied / "assignments.csv").write_text("file,cluster\na,1\n")
    assert cli.main(["export", str(copied), "--to", "parquet"]) == 1
    assert "no column confidence" in capsys.readouterr().err
    (copied / "assignments.csv").write_text("\n".join(lines) + "\n")
    (copied / "names.json").write_text(json.dumps({"format": 9, "levels": {}}))
    assert cli.main(["export", str(copied), "--to", "parquet"]) == 2
    assert "another version wrote it" in capsys.readouterr().err


def test_help_lists_the_formats(capsys):
    assert cli.main(["export", "--help"]) == 0
    told = capsys.readouterr().out
    for name in ("fiftyone", "label-studio", "--skip_missing"):
        assert name in told
