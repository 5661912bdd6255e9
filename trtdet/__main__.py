"""Runs the command line as ``python -m trtdet``."""

from trtdet.cli import main

raise SystemExit(main())
