"""Looking at runs from outside: what their folders say, without torch, on any machine that sees the files."""

from mmldlm.tools.history.run_history import History, Series
from mmldlm.tools.history.run_status import Exit, Process, State

__all__ = ["Exit", "History", "Process", "Series", "State"]
