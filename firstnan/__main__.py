"""Run `python -m firstnan train.py`, or one of the commands `replay`, `record` and `diff`."""

import importlib
import sys

COMMANDS = {"replay": "bundle", "record": "trace", "diff": "diff"}

if __name__ == "__main__":
    command = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in COMMANDS else None
    module = importlib.import_module(f"firstnan.{COMMANDS.get(command or '', 'script')}")
    sys.exit(module.main(sys.argv[2:] if command else None))
