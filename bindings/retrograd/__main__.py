"""``python -m retrograd``: the command line, see ``_cli.py``."""

import sys

from retrograd._cli import main

sys.exit(main())
