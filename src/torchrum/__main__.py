"""``python -m torchrum`` is the command ``torchrum``."""

import sys

from torchrum.cli import main

if __name__ == "__main__":
    sys.exit(main())
