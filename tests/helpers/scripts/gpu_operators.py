"""`mmldlm.train` on a CPU with the operators that a GPU would run, those of attention excepted."""

from __future__ import annotations

from mmldlm import train
from mmldlm.errors import exit_process
from mmldlm.model.ops import assume_device

with assume_device("cuda"):
    status = train.main()
exit_process(status)
