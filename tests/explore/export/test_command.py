"""`ssl_kd export`: what it prints, and one line for invalid input."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from pyarrow import parquet

from ssl_kd import cli
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation
from tests.faults.matrix import row as fault


@pytest.fixture
def copied(photo_run, tmp_path):
    return shutil.copytree(photo_run, tmp_path / "run")


def test_a_selection_with_the_names_that_people_chose(copied, tmp_path, capsys):
    Curation.open(copied).rename(0, "a ring")
    out = tmp_path / "some.parquet"
    argv = [str(copied), "--to", "parquet", "--split", "test", "--clusters", "0,1"]
    assert cli.main(["export", *argv, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"parquet: {out}" in printed and "read_parquet" in printed
    table, samples = parquet.read_table(out), Samples(copied)
    selected = np.isin(samples.column("cluster"), [0, 1]) & (samples.column("split") == "test")
    assert table["file"].to_pylist() == samples.column("file")[selected].tolist()
    assert set(table.column("split").to_pylist()) == {"test"}
    assert set(table.column("cluster").to_pylist()) == {0, 1}
    assert set(table.column("cluster_name").to_pylist()) == {"a ring", "1"}


@fault(173)
def test_force_replaces_a_file_once_the_new_one_is_complete_and_no_folder(
    copied, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out.parquet"
    argv = ["export", str(copied), "--to", "parquet", "--out", str(out)]
    out.write_text("mine")
    assert cli.main(argv) == 2 and "replace it with --force" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "write_table", lambda *a, **k: 1 / 0)
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
        "    ['--to', 'parquet', '--out', 'x.csv'], ['--to', 'parkit'],\n"
        "    ['--to', 'parquet', '--link', 'copy'],\n"
        "]:\n"
        f"    assert main(['export', {str(copied)!r}, *argv]) == 2, argv\n"
        "assert main(['export', 'nowhere', '--to', 'parquet']) == 2\n"
        "assert not {'torch', 'pyarrow', 'sklearn'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 6


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
    ],
)
def test_invalid_input_is_one_line(photo_run, capsys, argv, message):
    assert cli.main(["export", str(photo_run), *argv]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and len(error.splitlines()) == 1, error
    assert not (photo_run / "export").exists()


def test_a_run_whose_table_lacks_a_column_is_refused(copied, capsys):
    (copied / "assignments.csv").write_text("file,cluster\na,1\n")
    assert cli.main(["export", str(copied), "--to", "parquet"]) == 1
    assert "no column confidence" in capsys.readouterr().err


def test_help_lists_the_formats(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(name in printed for name in ("fiftyone", "label-studio", "--skip_missing"))
