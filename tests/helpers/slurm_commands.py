"""Stand-ins for commands of Slurm, as scripts."""

SCONTROL = """\
#!/usr/bin/env bash
set -eu
case "$1" in
  show) [ "$2 $3" = "hostnames node[0-1]" ] && printf '127.0.0.1\\n127.0.0.1\\n' ;;
  requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""
