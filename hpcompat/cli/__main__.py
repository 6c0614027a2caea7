"""``python -m hpcompat.cli``: the command without its console script."""

import sys

from hpcompat.cli import main

if __name__ == "__main__":
    sys.exit(main())
