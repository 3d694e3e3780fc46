#!/usr/bin/env bash
# Start this node's processes of a run. Call it on every node, with the same arguments, within a minute:
#
#   NNODES=2 NODE_RANK=0 NPROC_PER_NODE=8 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 \
#     bash scripts/launch_node.sh ENGINE CONFIG.yaml [key.sub=value ...] [--check]
#
# --check starts all processes, compares config, data, versions and run folder, times an all-reduce, and ends.
#
# ENGINE           a file of accelerate_configs/ without .yaml, such as ddp, fsdp2, fsdp2_hsdp (a replica on each node)
# NPROC_PER_NODE   processes on each node: as many as it has GPUs
# NNODES           nodes; default 1
# NODE_RANK        number of this node, from 0
# MASTER_ADDR      address of node 0, as all nodes reach it
# MASTER_PORT      a free port of node 0; default 29500
# MAX_RESTARTS     how often a node restarts its processes after one has failed; default 0
# LOG_DIR          everything printed is also appended to LOG_DIR/nodeNODE_RANK.log; default logs
# NODE_CHECK       skip: no checks of this machine before the start
# CHECK_TIMEOUT    seconds for which --check waits for the other nodes; default 60
# PYTHON           interpreter with mmldlm; default: that of .venv, or the one next to mmldlm on PATH
#
# The exit code is the launcher's; run.dir/exit.json has the run's own. A signal to this script reaches the launcher,
# which forwards it: SIGTERM, or SIGHUP without nohup, saves a checkpoint and ends the run, and the same command resumes
# from it. A launcher that is killed ends its processes as well: they save.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() { printf 'launch_node: error: %s\n' "${*//[[:cntrl:]]/?}" >&2; exit 2; }
number() { # NAME LEAST MOST
  if ! [[ "${!1}" =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((${!1} < $2 || ${!1} > $3)); then
    fail "$1: expected a whole number from $2 to $3, found '${!1}'"
  fi
}

[ $# -ge 2 ] || fail "expected ENGINE CONFIG.yaml [key.sub=value ...] [--check], found '$*'"
engine="$1" config="$2"
shift 2
settings=() check=()
for argument; do
  if [ "$argument" = --check ]; then check=(--check); else settings+=("$argument"); fi
done
NNODES="${NNODES:-1}" MASTER_PORT="${MASTER_PORT:-29500}" MAX_RESTARTS="${MAX_RESTARTS:-0}" LOG_DIR="${LOG_DIR:-logs}"
CHECK_TIMEOUT="${CHECK_TIMEOUT:-60}"
number NNODES 1 100000
required=(NPROC_PER_NODE)
((NNODES == 1)) || required+=(NODE_RANK MASTER_ADDR)
for name in "${required[@]}"; do
  [ -n "${!name:-}" ] || fail "$name is not set; expected ${required[*]}"
done
NODE_RANK="${NODE_RANK:-0}" MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
number NPROC_PER_NODE 1 1000
number NODE_RANK 0 $((NNODES - 1))
number MASTER_PORT 1 65535
number MAX_RESTARTS 0 1000
number CHECK_TIMEOUT 1 100000
if ! [[ "$MASTER_ADDR" =~ ^[A-Za-z0-9:[][]A-Za-z0-9._:%-]{0,254}$ ]]; then
  fail "MASTER_ADDR: expected a host name or address, found '$MASTER_ADDR'"
fi
export NNODES NODE_RANK NPROC_PER_NODE MASTER_ADDR MASTER_PORT

launcher_config="$root/accelerate_configs/$engine.yaml"
if ! [[ "$engine" =~ ^[A-Za-z0-9_-]+$ && -f "$launcher_config" ]]; then
  engines=("$root"/accelerate_configs/*.yaml)
  engines=("${engines[@]##*/}")
  fail "ENGINE: expected one of ${engines[*]%.yaml}, the files of $root/accelerate_configs, found '$engine'"
fi
[ -z "${DOCTOR+set}" ] || fail "DOCTOR is gone, use NODE_CHECK=skip"
[ -f "$config" ] || fail "CONFIG.yaml: no such file: $config"

python="${PYTHON:-$root/.venv/bin/python}"
if [ -z "${PYTHON:-}" ] && [ ! -x "$python" ]; then
  installed="$(command -v mmldlm)" || fail "no mmldlm here: run \`bash scripts/setup.sh\`, or set PYTHON"
  python="$(dirname "$installed")/python"
fi
command -v -- "$python" >/dev/null || fail "PYTHON: $python cannot be run"

launch=("$python" -m accelerate.commands.launch --config_file "$launcher_config"
  --num_machines "$NNODES" --machine_rank "$NODE_RANK" --num_processes $((NNODES * NPROC_PER_NODE))
  --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" --max_restarts "$MAX_RESTARTS")
if [[ "$engine" == zero* ]]; then
  "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("deepspeed"))' ||
    fail "ENGINE: $engine needs DeepSpeed, mmldlm's extra deepspeed, which is not installed"
  launch+=(--deepspeed_multinode_launcher standard) # this script runs on each node: no ssh, no hostfile
fi
if [ "$engine" = fsdp2_hsdp ]; then
  launch+=(--parallelism_config_dp_replicate_size "$NNODES" --parallelism_config_dp_shard_size "$NPROC_PER_NODE")
fi
if [ ${#check[@]} != 0 ]; then
  launch+=(--rdzv_conf "timeout=$CHECK_TIMEOUT" --max_restarts 0)
  export TORCH_CPP_LOG_LEVEL=FATAL # the launcher's last line names what PyTorch would trace
fi
launch+=(-m mmldlm.train "$config" "${settings[@]}" "${check[@]}")
# Seconds that processes have to save after a signal, or to notice the loss of a rank, before the launcher kills them.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"

# The launcher would forward SIGHUP though nohup has it ignored, and kill what does not end.
[ -z "$(trap -p HUP)" ] || export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGQUIT}"

mkdir -p -- "$LOG_DIR" || fail "LOG_DIR: cannot create $LOG_DIR"
# tee ignores the signals that end the launcher, so that it still writes the launcher's last output.
exec > >(trap '' INT TERM HUP && exec tee -a -- "$LOG_DIR/node$NODE_RANK.log") 2>&1
printf '==> %s node %s of %s on %s:' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$NODE_RANK" "$NNODES" "$(uname -n)"
printf ' %q' "${launch[@]}"
printf '\n'

if [ "${NODE_CHECK:-}" != skip ]; then
  trap 'exit 143' TERM # once the check has ended, in seconds; process 1 of a container would ignore the signal
  "$python" -m mmldlm.cli train "$config" "${settings[@]}" --check --processes "$NPROC_PER_NODE" \
    --accelerate_config "$launcher_config" || exit $?
  trap - TERM
fi

exec "${launch[@]}"
