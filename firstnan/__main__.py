"""Run `python -m firstnan train.py`; see `firstnan.script`."""

from firstnan.script import main

raise SystemExit(main())
