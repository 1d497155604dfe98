"""``python -m kvbridge.cli`` is ``kvbridge``."""

import sys

from kvbridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
