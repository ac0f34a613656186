"""Run `python -m firstnan train.py` or `python -m firstnan replay BUNDLE`."""

import sys

from firstnan import bundle, script

if __name__ == "__main__":
    is_replay = sys.argv[1:2] == ["replay"]
    sys.exit(bundle.main(sys.argv[2:]) if is_replay else script.main())
