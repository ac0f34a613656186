"""The commands `doctor`, `install-check`, `replay` and `config`."""

from __future__ import annotations

from collections.abc import Sequence

from ssl_kd.cli.flags import FlagParser
from ssl_kd.cli.language import language_settings
from ssl_kd.core.errors import FAILED, OK, InputError


def doctor(argv: Sequence[str]) -> int:
    """Check numerics for NaN and infinity, or with `gradients`, a user's language model."""
    if argv[:1] == ["gradients"]:
        return _gradients(argv[1:])
    FlagParser(prog="ssl_kd doctor").parse_args(argv)
    from ssl_kd.doctor import nan_issues

    return nan_issues()


def _gradients(argv: Sequence[str]) -> int:
    prog = "ssl_kd doctor gradients --model FOLDER"
    parser = FlagParser(prog=prog, add_help=False)
    parser.add_argument("--model")
    flags, rest = parser.parse_known_args(argv)
    model = [] if flags.model is None else ["--student_model", flags.model]
    resolved = language_settings([*model, *rest], prog)
    if resolved.student_model.startswith(("fresh:", "layers:", "llama:")):
        raise InputError(
            f"STUDENT_MODEL is {resolved.student_model!r}, which only a run builds; expected an"
            " existing model: --model FOLDER, or --model with a name on the Hugging Face Hub"
        )
    from ssl_kd.cli.screen import open_screen

    open_screen()
    from ssl_kd.doctor import language_model

    return language_model(resolved)


def install_check(argv: Sequence[str]) -> int:
    """Check packages, device, precision and folders."""
    FlagParser(prog="ssl_kd install-check").parse_args(argv)
    from ssl_kd.doctor import installation

    return installation()


def config(argv: Sequence[str]) -> int:
    """Print a settings file with all defaults and comments."""
    parser = FlagParser(
        prog="ssl_kd config",
        epilog="ssl_kd config train > config.py; ssl_kd config distill > scripts/config.py",
    )
    parser.add_argument("command", choices=("train", "distill"))
    flags = parser.parse_args(argv)
    if flags.command == "train":
        from ssl_kd.vision.settings import VisionSettings as AllSettings
    else:
        from ssl_kd.language.settings import LanguageSettings as AllSettings
    print(AllSettings.file_text(), end="")
    return OK


def replay(argv: Sequence[str]) -> int:
    """Repeat a recorded step and print the cause of its fault.

    The exit code is 1 if the fault does not occur again.
    """
    parser = FlagParser(
        prog="ssl_kd replay",
        epilog="No other class that the bundle names is imported, since an import executes code. "
        "Bundles of `python -m firstnan --bundle` are shown, and run again by `python -m firstnan "
        "replay BUNDLE --model MODULE:CALLABLE`.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="a file in the folder faults/ of a run")
    parser.add_argument("--head", metavar="CLASS", help="import path of your head")
    parser.add_argument("--loss", metavar="CLASS", help="import path of your loss")
    flags = parser.parse_args(argv)
    from ssl_kd.cli.screen import open_screen

    open_screen()
    from firstnan import bundle
    from ssl_kd.core.runs.fault_bundle import OtherKind, load_bundle

    try:
        recorded = load_bundle(flags.bundle).settings.get("replay")
    except OtherKind as error:
        if error.kind != bundle.KIND:
            raise
        return bundle.main([flags.bundle])
    if isinstance(recorded, dict) and recorded.get("mode") == "language":
        from ssl_kd.language.train import replay as language

        report = language.replay(flags.bundle)
    else:
        from ssl_kd.vision import replay as vision

        report = vision.replay(flags.bundle, head=flags.head, loss=flags.loss)
    print(report)
    return OK if report.reproduced else FAILED
