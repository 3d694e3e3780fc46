"""`python -m mmldlm COMMAND ...`, for launchers."""

from mmldlm.cli import main

main()
