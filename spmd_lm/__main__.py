"""`python -m spmd_lm` is `spmd-lm`."""

import sys

from spmd_lm.cli import main

sys.exit(main())
