"""`python -m pretuned` is `pretuned`."""

import sys

from pretuned.cli import main

sys.exit(main())
