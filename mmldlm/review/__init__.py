"""Looking at runs from outside: what their folders say, without torch, on any machine that sees the files."""

from mmldlm.review.ending import Exit, Process, State
from mmldlm.review.history import History, Series

__all__ = ["Exit", "History", "Process", "Series", "State"]
