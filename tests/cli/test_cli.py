"""The command line: flags over file over defaults; a line and an exit code per known failure."""

import dataclasses
import errno
import importlib
import io
import json
import pkgutil
import re
import shlex
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

import firstnan
import ssl_kd
import ssl_kd_explore
from firstnan.events import Event
from firstnan.parts import TooFewHealthyParts
from ssl_kd import cli
from ssl_kd.cli import failures, guarded
from ssl_kd.cli.flags import read_settings
from ssl_kd.cli.screen import ProgressBars
from ssl_kd.core.errors import MissingPackage
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.runs.fault_bundle import Bundle, save_bundle
from ssl_kd.core.runs.folder import RunFinished, RunFolderError
from ssl_kd.core.runs.stop import Interrupted
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.vision.settings import VisionSettings
from tests.faults.matrix import row
from tests.processes import python

ROOT = Path(__file__).parents[2]
ABOUT = {"dataset": {"n_train": 40, "n_labelled": 40}}  # of metrics.json


def read(argv, config):
    return read_settings(VisionSettings, argv, Path(config), prog="train.py")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("LEARNING_RATE = 0.25\nSEED = 5\nRESUME = True\n")
    return path


@pytest.mark.parametrize(
    "argv",
    [
        ["--learning_rate", "0.5"],
        ["--learning-rate", "0.5"],
        ["--learning_rate=0.5"],
        ["--learning-rate=.5"],
    ],
)
def test_flags_in_both_spellings_override_the_file(argv, config):
    settings = read(argv, config)
    assert settings == VisionSettings(learning_rate=0.5, seed=5, resume=True)


def test_switches_and_none(config):
    settings = read(["--no-resume", "--force-recompute", "--clip_grad", "None"], config)
    assert not settings.resume and settings.force_recompute and settings.clip_grad is None
    assert read(["--no_resume"], config).resume is False


def test_a_switch_may_be_written_as_hf_argument_parser_has_it(config):
    for argv in (
        ["--baselines", "False"],
        ["--baselines=false"],
        ["--baselines", "--no_baselines"],
    ):
        assert read(argv, config).baselines is False
    for argv in (["--baselines", "true", "--seed", "7"], ["--no-baselines", "--baselines"]):
        assert read(argv, config).baselines is True  # the last one counts, as of any flag


HOSTILE = [
    *(["--"], ["--", "--seed", "5"], ["--=5"], ["---seed=5"], ["-"], ["-s5"], [""]),
    *(["--seed", ""], ["--seed= 5 6"], ["--seed", "5", "--seed"], ["--run_name", "--seed", "3"]),
    *(["--run_name=a\0b"], ["--run_name", "\udcff"], ["--Resume", "True"], ["--resume", "maybe"]),
    *(["--no-no-resume"], ["--no-"], ["--no-seed=3"], ["--no-help"], ["--hel"]),
    ["--per_device_train_batch_size", "4", "--batch_size", "4"],
    ["--per_device_train_batch_size=" + "9" * 5000],
    *(["--learning_rate", "-1e-3"], ["--learning_rate", "1e999"]),
    *(["--hub_*", "x"], ["--_"], ["--" + "a" * 100_000], ["--" + "adam_" * 10_000]),
    *(["--dätäset", "x"], ["--config", "", "--seed", "1"], ["@config.py"], ["--seed\n--resume"]),
]


@row(154)
@pytest.mark.parametrize("argv", HOSTILE, ids=lambda argv: " ".join(argv)[:30])
@pytest.mark.parametrize("command", [cli.train, cli.distill])
def test_hostile_words_are_one_line_and_code_2(argv, command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert command(argv, config=tmp_path / "config.py") == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("ssl_kd: ") and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", VisionSettings.rules())
def test_every_setting_is_a_flag(name, config):
    kind = VisionSettings.rules()[name][0]
    value = getattr(VisionSettings(), name)
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        argv = [flag] if kind is bool else [flag, str(value)]
        assert getattr(read(argv, config), name) == (True if kind is bool else value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lerning_rate", "1"], "There is no flag --lerning_rate. Did you mean --learning_rate?"),
        (["--n-head=3"], "There is no flag --n-head=3. Did you mean --n_heads?"),
        (["--num_epoch", "1"], "Did you mean --epochs?"),
        (["--SEED", "1"], "There is no flag --SEED. Did you mean --seed?"),
        (["--no_resum"], "Did you mean --no_resume?"),
        (["--qqqq", "1"], "There is no flag --qqqq. --help lists all flags."),
        (["--seed", "x"], "SEED is 'x', but must be a whole number, at least 0"),
        (["--seed"], "argument --seed: expected one argument"),
        (["--seed", "1", "2"], "'2' belongs to no flag"),
        (["--resume", "yes"], "RESUME is 'yes', but must be True or False"),
        (["--student_temp", "0.01"], "STUDENT_TEMP is 0.01, but must be a finite number, at least"),
        (["--learning_rate", "-1"], "LEARNING_RATE is -1.0, but must be"),
        (["--learning_rate", "nan"], "LEARNING_RATE is nan, but must be a finite number"),
        (["--teacher", "dinov"], "'open_clip:NAME', 'torchvision:NAME'. Did you mean dinov3?"),
        (["--loss", "temy"], "LOSS is 'temy', but must be one of 'temi', 'sharpened',"),
        (["--config", "none.py"], "none.py cannot be read as a settings file: No such file"),
        (["--no-resume=True"], "ignored explicit argument 'True'; --help lists all flags"),
    ],
)
def test_a_bad_flag_is_one_message_and_code_2(argv, message, config, capfd):
    assert cli.train(argv, config=config) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


# Since Python 3.14 a path that is too long does not exist; before, asking raises an error.
TOO_LONG = "File name too long" if sys.version_info < (3, 14) else "x' is neither the name of"
WRONG = [
    (["train", "--dataset", "nowhere"], "'nowhere' is neither the name of a data set"),
    (["train", "--dataset", "digts"], "did you mean 'digits'"),
    (["train", "--dataset", "CIFAR-10"], "did you mean 'cifar10'"),
    (["train", "--dataset", "~nobodyhere/x.npy"], "'~nobodyhere/x.npy' is neither"),
    (["train", "--dataset", "a\nb\x1b[2J"], "is neither"),
    (["train", "--dataset", "x" * 5000], TOO_LONG),
    (["train", "--dataset", "notes.txt"], "nor a file of features or a table (.npy"),
    (["train", "--dataset_test", "nowhere"], "'nowhere' is neither"),
    (["train", "--extend", "nowhere"], "neither nowhere nor runs/nowhere is a run folder"),
    (["train", "--run_name", "taken"], "already holds an unfinished run"),
    (["train", "--resume", "--run_name", "gone"], "holds no run to resume"),
    (["extract", "--dataset", "nowhere"], "'nowhere' is neither"),
    (["extract", "--rank", "0"], "--rank is 0 and --world None; expected both"),
    (["explore", "nowhere"], "nowhere is not a run folder"),
    (["explore", "~nobodyhere/run"], "is not a run folder"),
    (["export", "nowhere", "--to", "parquet"], "nowhere is not a run folder"),
    (["curate", "nowhere"], "nowhere is not a folder"),
    (["judge", "./nowhere"], "nowhere does not exist"),
    (["judge", "runs/nowhere"], "nowhere does not exist"),
]


def test_help_and_missing_files_are_reported_before_torch_is_imported(tmp_path):
    for name in ("notes.txt", "runs/taken/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    code = (
        "import json, sys, ssl_kd.cli as c\n"
        "assert c.main(['--help']) == 0 and 'torch' not in sys.modules\n"
        "for words in json.load(sys.stdin):\n"
        "    assert c.main(words) == 2, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    given = json.dumps([words for words, _ in WRONG])
    done = python(tmp_path, "-c", code, input=given, text=True)
    assert done.returncode == 0 and "usage: ssl_kd COMMAND" in done.stdout, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(WRONG)
    for (words, part), line in zip(WRONG, lines, strict=True):
        assert part in line and line.isprintable(), words


def test_train_py_reads_the_config_beside_it_from_any_folder(tmp_path):
    done = python(tmp_path, str(ROOT / "train.py"), "--sed", "1", text=True)
    assert done.returncode == 2
    assert done.stderr == "ssl_kd: There is no flag --sed. Did you mean --seed?\n"


def test_main_names_its_commands(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == ssl_kd.__version__
    assert cli.main([]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err


def test_the_three_distributions_and_the_citation_have_one_version():
    version = ssl_kd.__version__
    assert firstnan.__version__ == ssl_kd_explore.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    pins = [
        pin
        for folder in (ROOT, ROOT / "explore")
        for pin in re.findall(r'"(\w+)==([\d.]+)"', (folder / "pyproject.toml").read_text())
    ]
    assert dict(pins) == dict.fromkeys(("firstnan", "ssl_kd", "ssl_kd_explore"), version)
    assert len(pins) == 3


def test_without_the_explorer_its_commands_name_the_line_that_installs_it(tmp_path):
    (tmp_path / "run").mkdir()
    for file in ("config.json", "curation.jsonl"):
        (tmp_path / "run" / file).write_text("{}")
    code = (
        "import importlib.metadata, sys\n"
        "importlib.metadata.entry_points = lambda **selected: ()\n"
        "import ssl_kd, ssl_kd.cli as c\n"
        "for name in ('explore', 'curate', 'compare', 'export', 'watch', 'report'):\n"
        "    assert c.main([name, 'run']) == 1, name\n"
        "try:\n    ssl_kd.Run\nexcept ImportError as error:\n    print(error)\n"
        "assert 'ssl_kd_explore' not in sys.modules\n"
    )
    done = python(tmp_path, "-c", code, text=True)
    lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    assert done.returncode == 0 and len(lines) == 7, done.stderr
    for line in lines:
        assert "needs the package ssl_kd_explore: pip install 'ssl_kd[explore]'" in line


# --- Known failures -----------------------------------------------------------------------------


@pytest.fixture
def run_that(monkeypatch, tmp_path):
    """`cli.train` with a run of our own in place of the real one."""

    def use(run, argv=()):
        module = types.ModuleType("ssl_kd.vision.run")
        module.run = run  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "ssl_kd.vision.run", module)
        return cli.train(argv, config=tmp_path / "none.py")

    return use


def raises(error):
    def run(settings, *, progress):
        raise error

    return run


def known_errors():
    return {
        2: [  # invalid input
            SettingsError("N_HEADS is 0"),
            RunFinished(Path("a")),
            RunFolderError("a holds no run to resume"),
            FileNotFoundError("no folder my_images"),
            PermissionError(13, "Permission denied", "runs"),
            OSError(errno.ENAMETOOLONG, "File name too long", "runs"),
        ],
        1: [  # any other failure
            CorruptFileError("embeddings_train.pt"),
            MissingPackage("reading parquet needs pyarrow"),
            ModuleNotFoundError("No module named 'timm'", name="timm"),
            torch.OutOfMemoryError("tried to allocate 2 GiB. And more"),
            MemoryError(),
            OSError(errno.ENOSPC, "No space left on device", "a.pt"),
            ConnectionError("no route"),
        ],
        3: [TooFewHealthyParts("all heads are sick")],
        130: [KeyboardInterrupt(), Interrupted(signal.SIGINT, Path("runs/a"))],
        143: [Interrupted(signal.SIGTERM, Path("runs/a"))],
    }


@pytest.mark.parametrize("code", [1, 2, 3, 130, 143])
def test_a_known_failure_is_one_line_and_a_code(code, capfd):
    for error in known_errors()[code]:

        def fails(error=error):
            raise error

        assert guarded(fails) == code, error
        out, err = capfd.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1 and err.startswith("ssl_kd: ")
        assert "Traceback" not in err and "Errno" not in err


def test_unprintable_characters_are_escaped(tmp_path, monkeypatch):
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert guarded(lambda: print("später 犬") or 0) == 0
    assert (tmp_path / "out").read_text() == "sp\\xe4ter \\u72ac\n"


def test_the_guards_report_keeps_its_lines_but_only_the_first_few(capfd):
    def fails(lines, kind=TooFewHealthyParts):
        raise kind("kd is nan\n\n" + "\n".join(f"line {i} " for i in range(lines)))

    assert guarded(lambda: fails(3)) == 3
    assert capfd.readouterr().err == "ssl_kd: kd is nan\n  line 0\n  line 1\n  line 2\n"
    assert guarded(lambda: fails(500)) == 3
    stderr = capfd.readouterr().err.splitlines()
    assert len(stderr) == failures.MAX_LINES and stderr[-1] == "  ... (490 more lines)"
    assert guarded(lambda: fails(2, SettingsError)) == 2
    assert capfd.readouterr().err == "ssl_kd: kd is nan line 0 line 1\n"


def test_the_exit_codes_are_written_down():
    from ssl_kd.core import errors

    page = (ROOT / "docs" / "start.md").read_text()
    for code in (0, 1, 2, 3, 130, 143):
        assert re.search(rf"\b{code}\b", str(errors.__doc__)) and f"| {code} |" in page


NOWHERE = ["--teacher_model", "./nowhere", "--data_path", "./nowhere.txt", "--device", "cpu"]


@row(97)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["train", "--runs_dir", "full"],
            "RUNS_DIR is 'full' and RUN_NAME None, but full cannot be made (File",
        ),
        (["train", "--runs_dir", "full/runs"], "full/runs cannot be made (Not a directory)"),
        (["train", "--run_name", "x" * 300], "cannot be made (File name too long)"),
        (["train", "--resume"], "no unfinished run in runs"),
        (["train", "--device", "cuda:99"], "torch sees"),
        (["distill", *NOWHERE], "nowhere"),
        (["distill", "--data_path", "full"], "expected an existing folder or text file"),
        (["distill", "--preset", "stabel"], "Did you mean stable?"),
        (["distill", "--resume"], "no unfinished run"),
        (["distill", *NOWHERE, "--teacher_cache", "no cache"], "nowhere"),
        (["verify", *NOWHERE], "nowhere"),
        (["verify", "--teacher_model", "none"], "none"),
        (["doctor", "gradients", "--model", "./nowhere"], "nowhere"),
        (["doctor", "--fast"], "no flag --fast. ssl_kd doctor --help lists"),
        (["install-check", "--fast"], "no flag --fast"),
        (["replay"], "arguments are required: BUNDLE"),
        (["replay", "none.pt"], "none.pt: No such file or directory"),
        (["replay", "."], "."),
        (["config", "trian"], "invalid choice: 'trian'"),
        (["doctor", "gradients", "--model"], "argument --model: expected one argument"),
        (["replay", "full"], "full is not a fault bundle"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_arguments_exit_with_code_2(words, expected, tmp_path, monkeypatch, capfd):
    pytest.importorskip("transformers")
    (tmp_path / "full").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    out, err = capfd.readouterr()
    message = err[err.rindex("ssl_kd: ") :]
    assert out == "" and expected in message, err
    assert all(line.startswith("  - ") for line in message.splitlines()[1:]), err
    assert "Traceback" not in err and "Errno" not in err
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "runs"}
    assert not list(tmp_path.glob("runs/*"))


def test_an_interrupted_run_prints_the_command_to_resume(run_that, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my images").mkdir()
    run_that(raises(Interrupted(signal.SIGTERM, Path("runs/fast"))), ["--dataset", "my images"])
    python = shlex.quote(sys.orig_argv[0])
    way = f"continue with: {python} train.py --dataset 'my images' --resume --run_name fast\n"
    assert capfd.readouterr().err.endswith(way)


def test_a_considered_value_error_is_a_line_and_one_from_elsewhere_keeps_its_trace(run_that, capfd):
    from ssl_kd.vision.train.heads import import_head

    assert run_that(lambda settings, *, progress: import_head("heads.lost.Head")) == 2
    assert "cannot be imported" in capfd.readouterr().err
    with pytest.raises(ValueError, match="not enough values"):
        run_that(lambda settings, *, progress: _unpack())


def test_every_exception_of_the_library_is_a_failure_that_a_user_can_act_on():
    from ssl_kd.core.errors import Interrupted, UserError

    for package in (ssl_kd, ssl_kd_explore):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    assert not issubclass(Interrupted, Exception)  # who catches all errors does not catch it
    found = [UserError]
    for kind in found:
        found += kind.__subclasses__()
    packages = ("ssl_kd.", "ssl_kd_explore.", "firstnan.")
    defined = {
        value
        for name, module in sys.modules.items()
        if name.startswith(packages)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception)
        if value.__module__.startswith(packages)
        if not value.__name__.startswith("_")  # caught where it is raised
    }
    assert defined == set(found) and len(found) > 10


def _unpack():
    one, two = json.loads("[]")
    return one, two


def test_an_internal_error_keeps_its_traceback(run_that):
    with pytest.raises(ZeroDivisionError):
        run_that(raises(ZeroDivisionError()))
    with pytest.raises(ModuleNotFoundError):
        run_that(raises(ModuleNotFoundError("no", name="ssl_kd.vision.lost")))


def test_a_run_shows_progress_table_and_report(run_that, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    row = {"name": "consensus", "split": "train", "acc": 0.9331, "nmi": 0.9, "ari": None}
    (tmp_path / "metrics.json").write_text(json.dumps({"table": [row], **ABOUT}))
    (tmp_path / "report.html").write_text("<html>")

    def run(settings, *, progress):
        assert settings == VisionSettings()
        progress("train", 1, 2, {"loss": 0.123456})
        progress("train", 2, 2, {"loss": 0.1})
        return tmp_path

    assert run_that(run) == 0
    out, err = capfd.readouterr()
    assert "consensus" in out and "93.3" in out and "90.0" in out and " - " in out
    assert f"Report: {tmp_path / 'report.html'}\n" in out
    assert "train      1/2  loss 0.1235\n" in err and "train      2/2" in err


def test_a_run_that_ended_before_its_report_gets_it_on_resume(run_that, tmp_path, capfd):
    path = tmp_path / "runs" / "a"
    path.mkdir(parents=True)
    row = {"name": "k-means", "split": "train", "acc": 0.5}
    metrics = {"teacher": {"name": "features"}, "table": [row], **ABOUT}
    (path / "metrics.json").write_text(json.dumps(metrics))
    run = raises(RunFinished(path))
    assert run_that(run, ["--resume"]) == 0
    out, _ = capfd.readouterr()
    assert "50.0" in out and f"Report: {path / 'report.html'}\n" in out
    page = (path / "report.html").read_text()
    assert "k-means" in page

    assert run_that(run, ["--resume"]) == 2  # nothing is left to do
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert (path / "report.html").read_text() == page


def test_ctrl_c_during_the_report_prints_the_command_to_resume(
    run_that, tmp_path, capfd, monkeypatch
):
    def stop(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("ssl_kd.vision.report.write.run_samples", stop)
    assert run_that(lambda settings, *, progress: tmp_path / "a") == 130
    assert capfd.readouterr().err.endswith(" train.py --resume --run_name a\n")


def test_without_labels_there_is_a_line_in_place_of_the_table(run_that, tmp_path, capfd):
    row = {"name": "consensus", "split": "train", "acc": None}
    metrics = {"table": [row], "cluster_sizes": [14, 0, 26], **ABOUT}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    assert run_that(lambda settings, *, progress: tmp_path) == 0
    first, *files, following = capfd.readouterr().out.splitlines()
    assert following.startswith(f"Next: ssl_kd explore {tmp_path}; ssl_kd curate {tmp_path}; ")
    assert first.startswith("3 clusters of 0 to 26 samples. The data has no labels")
    assert files == [
        f"Clusters: {tmp_path / 'assignments.csv'}",
        f"Report: {tmp_path / 'report.html'}",
    ]


def test_progress_off_a_terminal_is_a_line_now_and_then():
    screen = Console(file=io.StringIO(), width=200)
    with ProgressBars(screen) as progress:
        for done in range(1, 101):
            progress("train", done, 100, {"loss": "[red]"})
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert lines == ["train      1/100  loss [red]", "train      100/100  loss [red]"]


@pytest.mark.parametrize(("reproduced", "code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("mode", ["vision", "language"])
def test_replay_prints_the_report_of_its_mode_and_whether_the_fault_recurred(
    mode, reproduced, code, monkeypatch, tmp_path, capfd
):
    class Report(str):
        pass

    def again(path, **classes):
        report = Report(f"cause of {path}")
        report.reproduced = reproduced  # type: ignore[attr-defined]
        return report

    event = Event(0, "kd", "loss", "the loss is not finite", "cut out")
    path = tmp_path / "b.safetensors"
    save_bundle(path, Bundle(event, torch.arange(2), {}, {"replay": {"mode": mode}}))
    module = "ssl_kd.language.train" if mode == "language" else "ssl_kd.vision"
    monkeypatch.setattr(f"{module}.replay.replay", again)
    assert cli.main(["replay", str(path)]) == code
    assert capfd.readouterr().out == f"cause of {path}\n"


# --- Aliases ------------------------------------------------------------------------------------


ALIASES = [
    pytest.param(cls, old, new, id=f"{cls.__name__}-{old}")
    for cls in (VisionSettings, LanguageSettings)
    for old, new in cls.aliases.items()
]


def other_than_default(cls, name):
    """A value that a setting may have and has not by default."""
    value = getattr(cls(), name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and not value:
        return 1
    if value is None and cls.rules()[name][0] is int:
        return 7
    if cls.rules()[name][2].choices:
        return cls.rules()[name][2].choices[-1]
    if name == "rollout_url":
        return "http://elsewhere:8000"
    return "elsewhere" if isinstance(value, str) else 0.25 if not value else value / 2


NEEDED = {  # what a setting is refused without
    "lora_target_modules": {"LORA_RANK": 2},
    "rollout_url": {"ON_POLICY": 0.5, "STUDENT_MODEL": "saved"},
    "teacher_weights": {"TEACHER": "dinov2"},
}


@pytest.mark.parametrize(("cls", "old", "new"), ALIASES)
def test_an_alias_works_by_file_flag_dictionary_and_on_resume(cls, old, new, tmp_path):
    value, needed = cls.rules()[new][0](other_than_default(cls, new)), NEEDED.get(new, {})
    expected = cls.from_dict({new.upper(): value, **needed})
    assert expected != cls.from_dict(needed) and old not in cls.rules()
    lines = "".join(f"{name} = {of!r}\n" for name, of in needed.items())

    def resolve(*argv, file=""):
        (tmp_path / "config.py").write_text(lines + file)
        return read_settings(cls, argv, tmp_path / "config.py", prog="x")

    assert resolve(file=f"{old.upper()} = {value!r}\n") == expected
    assert cls.from_dict({old.upper(): value, **needed}) == expected
    for flag in (f"--{old}", f"--{old.replace('_', '-')}"):
        file = f"{new.upper()} = {getattr(cls(), new)!r}\n"
        assert resolve(flag, str(value), file=file) == resolve(f"{flag}={value}") == expected
    both = f"{old.upper()} = {value!r}\n{new.upper()} = {value!r}\n"
    with pytest.raises(SettingsError, match=f"{old.upper()} and {new.upper()} are the same"):
        resolve(file=both)
    with pytest.raises(SettingsError, match=f"--{old} and --{new} are the same setting"):
        resolve(f"--{old}", str(value), f"--{new.replace('_', '-')}={value}")
    with pytest.raises(SettingsError, match=re.escape(f"Did you mean --{new}?")):
        resolve(f"--{old}x", "1")


def test_no_name_of_transformers_is_answered_by_a_guess(cls=LanguageSettings):
    transformers = pytest.importorskip("transformers")
    for field in dataclasses.fields(transformers.TrainingArguments):
        try:
            assert cls.named(field.name) in cls.rules()
        except SettingsError as error:
            assert "Did you mean" not in str(error), error


@pytest.mark.parametrize("cls", [VisionSettings, LanguageSettings])
def test_advice_for_foreign_names_names_settings(cls):
    for name, advice in cls.instead.items():
        assert name not in cls.aliases and name not in cls.rules()
        if name.endswith("_*"):  # a family of names
            name = name.replace("*", "qqqq")
        assert set(re.findall(r"--(\w+)", advice)) <= cls.rules().keys(), advice
        with pytest.raises(SettingsError) as refused:
            cls.named(name.upper())
        assert "--" not in str(refused.value) and "setting " + name.upper() in str(refused.value)


@pytest.mark.parametrize(
    ("main", "cls"), [(cli.train, VisionSettings), (cli.distill, LanguageSettings)]
)
def test_help_shows_what_most_runs_set_and_help_all_every_setting(main, cls, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")

    def listed(flag):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        names = [n for n in cls.rules() if re.search(rf"^  --{n}\b", text, re.M)]
        return names, text

    short, text = listed("--help")
    assert sorted(short) == sorted(cls.first) and 10 <= len(cls.first) <= 15
    assert f"{len(cls.rules()) - len(cls.first)} more settings are flags, too:" in text
    names, text = listed("--help-all")
    assert names == [*cls.rules()] and "more settings" not in text
    assert "at least 1" in text and "default: " in text
    for old, new in cls.aliases.items():
        entries = [part for part in text.split("\n  --") if f"--{part}".startswith(f"--{new} ")]
        assert re.search(rf"--{old}\b", entries[0]), f"{old} beside {new}"
