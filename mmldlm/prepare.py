"""`mmldlm prepare` for launchers, which start a module in many processes: `accelerate launch -m mmldlm.prepare ...`."""

from __future__ import annotations

import sys

from mmldlm.data.prepare.pipeline import main
from mmldlm.errors import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
