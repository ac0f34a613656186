"""Run `python -m firstnan train.py`; see `firstnan.script`."""

import sys

from firstnan.script import main

if __name__ == "__main__":
    sys.exit(main())
