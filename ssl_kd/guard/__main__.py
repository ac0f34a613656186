"""Run `python -m ssl_kd.guard train.py`; see `ssl_kd.guard.script`."""

import sys

from ssl_kd.guard.script import main

if __name__ == "__main__":
    sys.exit(main())
