"""`python -m jaxdiff.cli`, the same as `jaxdiff`."""

import sys

from jaxdiff.cli import main

if __name__ == "__main__":
    sys.exit(main())
