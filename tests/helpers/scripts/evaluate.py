"""`mmldlm evaluate ARGUMENTS`, as a launcher starts it."""

from __future__ import annotations

import os
import sys

from mmldlm.evaluate import main

status = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
