import pytest

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.sweep.grid import Grid, flags_of, read_list
from ssl_kd.vision.settings import VisionSettings


def read(*words):
    return Grid.read(VisionSettings, words)


def test_flags_with_several_values_are_axes_and_the_others_stay_flags():
    grid = read("--beta", "0.5,0.6", "--n_heads=8", "--seed=0..2", "--loss", "temi", "--baselines")
    assert grid.axes == {"beta": ("0.5", "0.6"), "seed": ("0", "1", "2")}
    assert grid.flags == ("--n_heads=8", "--loss=temi", "--baselines")


def test_every_combination_has_a_name():
    combinations = read("--beta", "0.5,0.6", "--seed", "3,7").combinations()
    assert list(combinations) == [
        *("beta-0.5_seed-3", "beta-0.5_seed-7"),
        *("beta-0.6_seed-3", "beta-0.6_seed-7"),
    ]
    assert combinations["beta-0.6_seed-3"] == {"beta": "0.6", "seed": "3"}


def test_aliases_and_hyphens_name_the_same_setting():
    assert read("--batch-size", "64,128").axes == {"batch_size": ("64", "128")}


def test_an_escaped_comma_belongs_to_the_value_and_json_is_one_value():
    grid = Grid.read(
        LanguageSettings,
        ["--teacher_model", r"a\,b,c", "--chat_template_kwargs", '{"a": 1, "b": 2}'],
    )
    assert grid.axes == {"teacher_model": ("a,b", "c")}
    assert grid.flags == ('--chat_template_kwargs={"a": 1, "b": 2}',)


def test_values_that_are_paths_give_names_of_folders():
    names = list(read("--dataset", "data/a.npy,data/b.npy").combinations())
    assert names == ["dataset-data-a.npy", "dataset-data-b.npy"]


def test_names_that_would_be_equal_are_told_apart_in_any_grid():
    first, second = read("--dataset", "a/b.npy,a-b.npy").combinations()
    assert first == "dataset-a-b.npy"
    assert second.startswith("dataset-a-b.npy_")
    assert list(read("--dataset", "c.npy,a/b.npy,a-b.npy").combinations())[1:] == [first, second]
    names = read("--dataset", "A.npy,a.npy").combinations()  # one folder on macOS and Windows
    assert len({name.casefold() for name in names}) == 2


def test_long_names_fit_into_a_file_system():
    names = list(read("--dataset", f"{'数' * 200}a,{'数' * 200}b").combinations())
    assert len(set(names)) == 2
    assert max(len(name.encode()) for name in names) < 200


def test_a_value_may_begin_with_a_dash():
    grid = read("--dataset=-a,-b", "--teacher=-c")
    assert grid.flags == ("--teacher=-c",)
    assert [flags_of(own) for own in grid.combinations().values()] == [
        ["--dataset=-a"],
        ["--dataset=-b"],
    ]


def test_a_huge_grid_is_refused_before_it_is_built():
    with pytest.raises(InputError, match="1,000,000,000,000 runs; expected at most 10,000"):
        read("--seed", "0..9999", "--n_heads", "1..10000", "--log_every", "1..10000").combinations()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--beta", "0.5,0.6", "--beta", "0.7,0.8"], "swept twice"),
        (["--run_name", "x", "--seed", "0,1"], "leave it out, and name the sweep by --name"),
        (["--resume", "--seed", "0,1"], "leave it out"),
        (["--runs_dir", "a,b"], "in one folder"),
        (["--seed", "4..0"], "expected a range"),
        (["--beta", "0.5..0.9"], "list the values, such as 0.5,0.6,0.7"),
        (["--seed", "0..99999999"], "expected a range"),
    ],
)
def test_what_cannot_be_swept_is_refused(words, message):
    with pytest.raises(SettingsError, match=message):
        read(*words)


def test_a_sweep_of_nothing_is_refused():
    with pytest.raises(InputError, match="Nothing is swept"):
        read("--beta", "0.5").combinations()


def test_a_list_is_crossed_with_the_axes(tmp_path):
    file = tmp_path / "list.csv"
    file.write_text("BETA, n_heads\n0.5, 4\n\n0.6, 8\n")
    rows = read_list(file, VisionSettings)
    found = read("--seed", "0,1").combinations(rows)
    assert list(found) == [
        *("beta-0.5_n_heads-4_seed-0", "beta-0.5_n_heads-4_seed-1"),
        *("beta-0.6_n_heads-8_seed-0", "beta-0.6_n_heads-8_seed-1"),
    ]
    with pytest.raises(InputError, match="column of --list"):
        read("--beta", "0.1,0.2").combinations(rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beta\n", "no runs"),
        ("beta,seed\n0.5,1\n0.5\n", "run 2 has 1 values; expected 2"),
        ("bta\n1\n", "first line names the settings: There is no setting bta"),
        ("beta,BETA\n0.5,0.6\n", "BETA in several columns"),
        ("beta,run_name\n0.5,x\n", "the column RUN_NAME; all runs"),
        ("beta,runs_dir\n0.5,x\n", "the column RUNS_DIR; all runs"),
        ("beta\n\udcff\n", "a CSV file in UTF-8"),
    ],
)
def test_a_list_that_is_no_table_of_settings_is_refused(tmp_path, text, message):
    file = tmp_path / "list.csv"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InputError, match=message):
        read_list(file, VisionSettings)
