"""Recipes: valid settings of their command, refused where they do not fit, named by the run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_kd import Distillation
from ssl_kd.cli import main
from ssl_kd.cli.flags import read_settings
from ssl_kd.cli.recipes import all_recipes, markdown, whole
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.presets import PRESETS
from ssl_kd.vision.settings import VisionSettings

RECIPES = all_recipes()
VISION_SCORES = {name: name for name in ("dino-knn", "dinov2-linear")}
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def settings_of(name):
    return LanguageSettings if name in LanguageSettings.recipes else VisionSettings


def read(cls, *words, config="none"):
    return read_settings(cls, words, Path(config), prog="x", presets=PRESETS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_known_settings_and_its_command_sets_the_same(name):
    recipe, cls = RECIPES[name], settings_of(name)
    assert not (recipe.values.keys() | recipe.needs.keys()) - cls.rules().keys()
    assert not recipe.values.keys() & recipe.needs.keys()
    followed = read(cls, "--recipe", name)
    assert {n: getattr(followed, n) for n in recipe.values} == dict(recipe.values)
    program, command, *flags = shlex.split(recipe.command_line)
    for flag in recipe.flags:  # of the command, not a setting
        at = flags.index(f"--{flag}")
        assert flags[at + 1] == recipe.flags[flag]
        del flags[at : at + 2]
    assert (program, command) == ("ssl_kd", recipe.command)
    written_out = read(cls, *flags)
    given = {needed: getattr(written_out, needed) for needed in recipe.needs}
    assert written_out == followed.replace(recipe=None, **given)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_its_sources_and_what_was_not_compared(name):
    recipe = RECIPES[name]
    digits = recipe.paper.arxiv.replace(".", "")
    assert digits.isdecimal() and len(digits) == 9
    assert recipe.expected[0].isdecimal() or recipe.expected == "not stated"
    assert recipe.reported and recipe.source
    assert any(line.startswith("Not ") for line in recipe.differs)


def test_both_modes_have_recipes_under_different_names():
    assert len(RECIPES) == len(VisionSettings.recipes) + len(LanguageSettings.recipes)
    assert {recipe.command for recipe in RECIPES.values()} == {"train", "evaluate", "distill"}


def test_flags_override_a_recipe_which_overrides_the_file(tmp_path):
    file = tmp_path / "config.py"
    file.write_text("N_HEADS = 3\nBETA = 0.7\nSEED = 9\n")
    followed = read(VisionSettings, "--recipe", "temi-cifar10", "--beta", "0.8", config=file)
    assert (followed.n_heads, followed.beta, followed.seed) == (50, 0.8, 9)


def test_the_other_lines_of_a_file_override_the_recipe_that_it_names(tmp_path):
    file = tmp_path / "config.py"
    file.write_text('N_HEADS = 3\nRECIPE = "temi-cifar10"\n')
    followed = read(VisionSettings, config=file)
    assert (followed.n_heads, followed.hidden_dim) == (3, 512)
    message = "--recipe is 'temi-stl10', and RECIPE in .* is 'temi-cifar10'"
    with pytest.raises(SettingsError, match=message):
        read(VisionSettings, "--recipe", "temi-stl10", config=file)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["train", "--recipe", "temi-cifr10"], ["Did you mean temi-cifar10?", "'temi-imagenet'"]),
        (["train", "--recipe", "dinov2-knn"], ["run `ssl_kd evaluate --recipe dinov2-knn`"]),
        (["evaluate", "--recipe", "temi-stl10"], ["run `ssl_kd train --recipe temi-stl10`"]),
        (
            ["distill", "--recipe", "moekd-sar"],
            ["TEACHER_MODEL to you: set --teacher_model to a mix"],
        ),
        (["distill", "--recipe", "gkd", "--preset", "t4"], ["--recipe is 'gkd', and the preset"]),
        (["judge", "x", "--recipe", "gkd"], ["--recipe has no effect on judging"]),
        (["recipes", "gdk"], ["There is no recipe 'gdk': temi-cifar10, ", "moekd-sar"]),
        (
            ["sweep", "--recipe", "temi-cifar10,temi-stl10", "--seed", "0,1", "--name", "x"],
            ["all runs follow one recipe"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(
    words, messages, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error
    assert not list(tmp_path.iterdir())


def test_the_command_prints_all_and_each_of_them(capsys):
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        (line,) = [line for line in table.splitlines() if line.split()[:1] == [name]]
        assert recipe.expected in line and recipe.paper.arxiv in line
    assert main(["recipes", "moekd-sar"]) == 0
    shown = capsys.readouterr().out
    recipe = RECIPES["moekd-sar"]
    assert shown == whole("moekd-sar", recipe)
    facts = (recipe.command_line, recipe.source, str(recipe.paper), *recipe.differs)
    assert all(fact in shown for fact in facts)


def test_the_page_holds_what_the_command_prints(capsys):
    assert main(["recipes", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text == markdown(RECIPES)
    assert PAGE.read_text(encoding="utf-8").endswith(text), "ssl_kd recipes --markdown"


def pictures(folder):
    rng = np.random.default_rng(0)
    for color in range(3):
        (folder / f"{color}").mkdir(parents=True)
        for i in range(20):
            pixels = 40 + 80 * color + rng.integers(0, 30, (4, 4, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{color}" / f"{i}.png")
    return str(folder)


def test_a_run_says_which_recipe_it_follows_and_records_it(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    other = ["--dataset", pictures(tmp_path / "pictures"), "--teacher", "pixels", "--epochs", "1"]
    small = ["--n_clusters", "3", "--n_heads", "2", "--baselines", "False", "--run_name", "r"]
    with caplog.at_level("INFO"):
        assert main(["train", "--recipe", "temi-cifar10", *other, *small]) == 0
    paper, expected, *differs, changed, method = caplog.messages[:10]
    recipe = RECIPES["temi-cifar10"]
    assert paper == f"recipe temi-cifar10: {recipe.paper}"
    assert expected.startswith("expected: 94.5 % accuracy")
    assert differs == [f"differs: {sentence}" for sentence in recipe.differs]
    names = "DATASET, N_CLUSTERS, TEACHER, N_HEADS, EPOCHS"
    assert changed == f"changed: {names}, so the expected number is not that of this run"
    assert method.startswith("METHOD is heads")
    saved = json.loads(Path("runs/r/config.json").read_text())["settings"]
    assert (saved["RECIPE"], saved["HIDDEN_DIM"], saved["N_HEADS"]) == ("temi-cifar10", 512, 2)
    assert "temi-cifar10" in Path("runs/r/report.html").read_text()


def test_the_embeddings_are_judged_by_a_recipe(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    data = ["--dataset", pictures(tmp_path / "pictures"), "--labels", "folders"]
    words = [*data, "--teacher", "pixels"]
    with caplog.at_level("INFO"):
        for name in ("dino-knn", "dinov2-linear"):
            flags = ["--token", "class", "--out", f"{name}.json"]
            steps = ["--probe_steps", "20"] if name == "dinov2-linear" else []
            assert main(["evaluate", "--recipe", name, *words, *flags, *steps]) == 0
    assert caplog.messages[0] == f"recipe dino-knn: {RECIPES['dino-knn'].paper}"
    rows = {name: json.loads(Path(f"{name}.json").read_text())[0] for name in VISION_SCORES}
    assert {name: row["settings"]["RECIPE"] for name, row in rows.items()} == VISION_SCORES
    assert "as_dinov2" in rows["dinov2-linear"]["linear_probe"]
    assert "as_dinov2" not in rows["dino-knn"]["linear_probe"]


def test_a_flag_of_the_command_that_overrides_the_recipe_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    data = ["--dataset", pictures(tmp_path / "pictures"), "--labels", "folders"]
    words = [*data, "--teacher", "pixels"]
    flags = ["--token", "class", "--probe", "logistic"]
    with caplog.at_level("INFO"):
        assert main(["evaluate", "--recipe", "dinov2-linear", *words, *flags]) == 0
    (changed,) = [line for line in caplog.messages if line.startswith("changed: ")]
    assert changed.startswith("changed: DATASET, TEACHER, TOKEN, PROBE, so")


def test_the_runs_of_a_sweep_follow_the_recipe_as_it_was_overridden(tmp_path, monkeypatch, capsys):
    from ssl_kd.sweep.plan import shared_settings

    monkeypatch.chdir(tmp_path)
    # 16 is the default, which a file of the settings that differ from the defaults would omit.
    resolved = read(VisionSettings, "--recipe", "temi-cifar10", "--n_heads", "16")
    lines = [f"{n} = {v!r}" for n, v in shared_settings(resolved, {"seed"}).items()]
    Path("sweep.py").write_text("\n".join(lines))
    assert read(VisionSettings, config="sweep.py") == resolved
    assert shared_settings(VisionSettings(), set()) == {}


def test_a_recipe_is_an_argument_of_distillation(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    models = tiny.folder("teacher"), tiny.folder("student", seed=4)
    texts = [f"text {i}" for i in range(40)]
    small = {"block_size": 32, "max_new_tokens": 4, "batch_size": 2, "generations": 0}
    job = Distillation(*models, texts, recipe="gkd", epochs=None, max_steps=1, **small)
    assert (job.settings.recipe, job.settings.divergence) == ("gkd", "reverse_kl")
    with caplog.at_level("INFO"):
        run = job.run()
    assert caplog.messages[0] == f"recipe gkd: {RECIPES['gkd'].paper}"
    saved = json.loads((run.path / "config.json").read_text())["settings"]
    assert (saved["RECIPE"], saved["ON_POLICY"]) == ("gkd", 1)
    with pytest.raises(SettingsError, match="recipe is 'gkd'; expected one of them"):
        Distillation(*models, texts, recipe="gkd", preset="small")
    with pytest.raises(SettingsError, match="leaves teacher to you: set teacher to the"):
        Distillation(texts=texts, recipe="gkd")
