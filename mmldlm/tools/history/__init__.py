"""Read runs from outside, from their folders: without torch, on any machine that sees the files."""

from mmldlm.tools.history.run_history import History, Series
from mmldlm.tools.history.run_status import ExitReport, RankProcess, RunState

__all__ = ["ExitReport", "History", "RankProcess", "RunState", "Series"]
