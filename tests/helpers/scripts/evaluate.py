"""`mmldlm evaluate ARGUMENTS`, as a launcher starts it."""

from __future__ import annotations

from mmldlm.errors import exit_process
from mmldlm.evaluate import main

exit_process(main())
