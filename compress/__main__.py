"""`python -m compress`."""

from compress.cli import main

raise SystemExit(main())
