"""`ssl_kd export`: what it prints, and one line for invalid input."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from pyarrow import parquet

from ssl_kd import cli
from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.naming import Names
from tests.faults.matrix import row as fault


@pytest.fixture
def copied(photo_run, tmp_path):
    return shutil.copytree(photo_run, tmp_path / "run")


def test_names_and_a_selection_in_one_command(copied, tmp_path, capsys):
    lines = [line.split(",") for line in (copied / "assignments.csv").read_text().splitlines()[1:]]
    shapes = {"digit 0": "a ring", "digit 1": "one stroke", "digit 4": "an open fork"}
    captions = tmp_path / "captions.csv"
    rows = [f"{line[0]},{line[3]},picture of {shapes[line[4]]}" for line in lines]
    captions.write_text("\n".join(["file,split,caption", *rows]) + "\n")
    out = tmp_path / "some.parquet"
    argv = [str(copied), "--to", "parquet", "--names", str(captions), "--split", "test"]
    assert cli.main(["export", *argv, "--clusters", "0,1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"parquet: {out}" in printed and "read_parquet" in printed and "names.json" in printed
    names = Names.load(copied)
    table = parquet.read_table(out)
    assert set(table.column("cluster").to_pylist()) == {0, 1}
    assert set(table.column("cluster_name").to_pylist()) == {names.of("cluster", c) for c in (0, 1)}
    assert not {"0", "1"} & set(table.column("cluster_name").to_pylist())


def test_columns_of_a_table_are_exported(copied, tmp_path, capsys):
    n = len((copied / "assignments.csv").read_text().splitlines()) - 1
    table = tmp_path / "map.csv"
    table.write_text("\n".join(["x,y", *(f"{i},{i / 2}" for i in range(n))]) + "\n")
    argv = ["export", str(copied), "--to", "parquet", "--columns", str(table)]
    assert cli.main(argv) == 0
    exported = parquet.read_table(copied / "export" / "clusters.parquet")
    assert exported.column("y").to_pylist() == [i / 2 for i in range(n)]
    argv += ["--out", str(tmp_path / "out.parquet")]
    for text, message in (("more\n1\n", "1"), ("a,a\n1,2\n", "two columns 'a'"), (None, "no file")):
        table.unlink() if text is None else table.write_text(text)
        assert cli.main(argv) != 0 and message in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()


@fault(173)
def test_force_replaces_a_file_once_the_new_one_is_complete_and_no_folder(
    copied, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out.parquet"
    argv = ["export", str(copied), "--to", "parquet", "--out", str(out)]
    out.write_text("mine")
    assert cli.main(argv) == 2 and "replace it with --force" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(parquet.ParquetWriter, "write_table", lambda *a, **k: 1 / 0)
        patch.setattr(parquet.ParquetWriter, "write_batch", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cli.main([*argv, "--force"])
    assert out.read_text() == "mine"
    assert cli.main([*argv, "--force"]) == 0
    assert parquet.read_table(out).num_rows > 100
    out.unlink()
    out.mkdir()
    (out / "thesis.txt").write_text("all of it")
    for to in ("parquet", "fiftyone", "folders", "hf-model"):
        assert cli.main(["export", str(copied), "--to", to, "--out", str(out), "--force"]) == 2
    assert (out / "thesis.txt").read_text() == "all of it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "run"]


@fault(173)
def test_invalid_paths_are_refused_before_torch_is_imported(copied, tmp_path):
    (tmp_path / "there.parquet").write_text("mine")
    program = (
        "import sys; from ssl_kd.cli import main\n"
        "for argv in [\n"
        f"    ['--to', 'parquet', '--out', {str(tmp_path / 'there.parquet')!r}],\n"
        "    ['--to', 'parquet', '--out', 'a\\0b.parquet'],\n"
        "    ['--to', 'parquet', '--out', 'x.csv'], ['--to', 'parkit'], ['--names', 'no.csv'],\n"
        "    ['--to', 'parquet', '--link', 'copy'],\n"
        "]:\n"
        f"    assert main(['export', {str(copied)!r}, *argv]) == 2, argv\n"
        "assert main(['export', 'nowhere', '--to', 'parquet']) == 2\n"
        "assert not {'torch', 'pyarrow', 'sklearn'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 7


@fault(173)
@pytest.mark.parametrize("name", ["cluster_name", "cluster_of_run", "file"])
def test_a_column_with_a_name_of_the_run_is_refused(photo_run, name):
    samples = Samples(photo_run)
    with pytest.raises(InputError, match=f"the run has a column '{name}' already"):
        Content.of(samples, columns={name: np.zeros(len(samples))})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--to", "parket"], "--to is 'parket'; expected parquet, folders, .*Did you mean parquet"),
        ([], "--to is required"),
        (["--to", "parquet", "--cluster", "1"], "There is no flag --cluster. Did you mean"),
        (["--to", "parquet", "--clusters", "one"], "--clusters has 'one'; expected numbers"),
        (["--to", "parquet", "--clusters", "9"], "no cluster 9"),
        (["--to", "parquet", "--split", "valid"], "no split 'valid'; expected train, test"),
        (["--to", "parquet", "--link", "copy"], "the format parquet has no option --link"),
        (["--names", "gone.csv"], "There is no file gone.csv"),
    ],
)
def test_invalid_input_is_one_line(photo_run, capsys, argv, message):
    assert cli.main(["export", str(photo_run), *argv]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and len(error.splitlines()) == 1, error
    assert not (photo_run / "export").exists()


def test_a_folder_that_is_not_a_finished_run_is_refused(copied, tmp_path, capsys):
    assert cli.main(["export", "--to", "parquet"]) == 2
    assert "arguments are required: RUN" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), "--to", "parquet"]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    lines = (copied / "assignments.csv").read_text().splitlines()
    (copied / "assignments.csv").write_text("file,cluster\na,1\n")
    assert cli.main(["export", str(copied), "--to", "parquet"]) == 1
    assert "no column confidence" in capsys.readouterr().err
    (copied / "assignments.csv").write_text("\n".join(lines) + "\n")
    (copied / "names.json").write_text(json.dumps({"format": 9, "levels": {}}))
    assert cli.main(["export", str(copied), "--to", "parquet"]) == 2
    assert "another version wrote the file" in capsys.readouterr().err


def test_help_lists_the_formats(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(name in printed for name in ("fiftyone", "label-studio", "--skip-missing"))
