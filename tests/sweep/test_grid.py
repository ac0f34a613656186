import pytest

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.sweep.grid import Grid, read_list
from ssl_kd.vision.settings import VisionSettings


def read(*words):
    return Grid.read(VisionSettings, words)


def test_flags_with_several_values_are_axes_and_the_others_stay_flags():
    grid = read("--beta", "0.5,0.6", "--n_heads=8", "--seed=0..2", "--loss", "temi", "--baselines")
    assert grid.axes == {"beta": ("0.5", "0.6"), "seed": ("0", "1", "2")}
    assert grid.flags == ("--n_heads", "8", "--loss", "temi", "--baselines")


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
    assert grid.flags == ("--chat_template_kwargs", '{"a": 1, "b": 2}')


def test_values_that_are_paths_give_names_of_folders():
    names = list(read("--dataset", "data/a.npy,data/b.npy").combinations())
    assert names == ["dataset-data-a.npy", "dataset-data-b.npy"]


def test_names_that_would_be_equal_are_numbered():
    assert len(set(read("--dataset", "a/b.npy,a-b.npy").combinations())) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--beta", "0.5,0.6", "--beta", "0.7,0.8"], "swept twice"),
        (["--run_name", "x", "--seed", "0,1"], "leave it out, and name the sweep by --name"),
        (["--resume", "--seed", "0,1"], "leave it out"),
        (["--runs_dir", "a,b"], "in one folder"),
        (["--seed", "4..0"], "expected a range"),
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
    file.write_text("BETA,n_heads\n0.5,4\n0.6,8\n")
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
    [("beta\n", "no rows"), ("beta,seed\n0.5\n", "different lengths"), ("bta\n1\n", "setting")],
)
def test_a_list_that_is_no_table_of_settings_is_refused(tmp_path, text, message):
    file = tmp_path / "list.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_list(file, VisionSettings)
