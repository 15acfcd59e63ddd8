"""``python -m gossipdp``: the command line, for launchers that start a module."""

import sys

from gossipdp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
