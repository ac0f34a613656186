"""`python -m ssl_kd`, the same as the command `ssl_kd`."""

from ssl_kd.cli import main

raise SystemExit(main())
