"""`mmldlm evaluate ARGUMENTS`, as a launcher starts it."""

from __future__ import annotations

from mmldlm.evaluate import main
from tests.helpers.trainer_scripts import leave

leave(main())
