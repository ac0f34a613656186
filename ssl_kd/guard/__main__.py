"""`python -m ssl_kd.guard`, the same as `python -m firstnan`."""

from firstnan.script import main

raise SystemExit(main())
