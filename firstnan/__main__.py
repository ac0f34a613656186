"""Run `python -m firstnan train.py`, or one of the commands `replay`, `record` and `diff`."""

import importlib
import sys

COMMANDS = {"replay": "bundle", "record": "trace", "diff": "diff"}


def main() -> int:
    """Run the command of the process's arguments, and return the exit code."""
    name = sys.argv[1] if sys.argv[1:] else ""
    if name == "--version":
        from firstnan import __version__

        print(f"firstnan {__version__}")
        return 0
    if name in COMMANDS:
        return importlib.import_module(f"firstnan.{COMMANDS[name]}").main(sys.argv[2:])
    return importlib.import_module("firstnan.script").main()


if __name__ == "__main__":
    sys.exit(main())
