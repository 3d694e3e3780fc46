"""`python -m mmldlm COMMAND ...`, for launchers."""

import sys

from mmldlm.cli import main

sys.exit(main())
