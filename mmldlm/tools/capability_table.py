"""Print the table of engine capabilities of docs/engines.md: `python -m mmldlm.tools.capability_table`."""

from mmldlm.distributed.capabilities import capability_table

if __name__ == "__main__":
    print(capability_table(), end="")
