"""`python -m milad` is the `milad` command."""

import sys

from milad.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
