"""`python -m leto_strategy` is the command `leto`."""

from leto_strategy.cli.main import main

raise SystemExit(main())
