"""A rank that only all-reduces, under a watchdog; its fault at step 7 is an argument.

    watchdog_rank.py FOLDER TIMEOUT_S FAULT [RANK, otherwise all]

It prints to FOLDER/outputN. At step 7 it writes its pid to FOLDER/ready.rankN, and FOLDER/heard.rankN once its own
heartbeat and that of rank 0 are known to have left step 0. With FAR=1 in the environment no rank can see another's
process, as on machines of their own. For faults of NCCL a stand-in reports what its flight recorder would.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from mmldlm.distributed import exit_files
from mmldlm.distributed.exit_files import write_exit
from mmldlm.distributed.watchdog import Watchdog
from mmldlm.errors import DataError, exit_code_and_cause, exit_process, run_command
from tests.helpers.nccl_recorder import FakeNCCLRecorder

FOLDER, TIMEOUT_S, FAULT = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
AT_FAULT = int(sys.argv[4]) if len(sys.argv) > 4 else None


START_TIMEOUT = timedelta(seconds=300)  # to come together on a machine that has other things to do


class Finished(Exception):
    pass


def end(watchdog: Watchdog) -> None:
    raise Finished


def work_alone(watchdog: Watchdog, seconds: float = 600) -> None:
    time.sleep(seconds)
    raise Finished


def spin(watchdog: Watchdog) -> None:
    while True:
        pass


def hold_the_interpreter(watchdog: Watchdog) -> None:
    re.match("(a+)+$", "a" * 64 + "b")


def raise_error(watchdog: Watchdog) -> None:
    raise DataError("sample 3: nothing in it")


def bug(watchdog: Watchdog) -> None:
    with watchdog.in_collective("backward: reduction of the gradients"):
        torch.ones(2) @ torch.ones(3)


def vanish(watchdog: Watchdog) -> None:
    os._exit(3)


def disconnect(watchdog: Watchdog) -> None:
    """Break gloo's connections, as a network does, but not those of the store."""
    for connection in psutil.Process().net_connections("tcp"):
        ports = {address.port for address in (connection.laddr, connection.raddr) if address}
        if connection.status == psutil.CONN_ESTABLISHED and int(os.environ["MASTER_PORT"]) not in ports:
            socket.socket(fileno=os.dup(connection.fd)).shutdown(socket.SHUT_RDWR)


def other_collective(watchdog: Watchdog) -> None:
    with watchdog.in_collective("barrier before saving"):
        dist.barrier()


def nccl_hang(watchdog: Watchdog) -> None:
    """Hang in a collective of NCCL: its calls have returned, and the main thread is outside of any phase."""
    FakeNCCLRecorder(progresses=False).install()
    work_alone(watchdog)


def nccl_waits_for_rank_1(watchdog: Watchdog) -> None:
    if dist.get_rank() != 1:
        FakeNCCLRecorder(progresses=False).install()
    work_alone(watchdog)


def nccl_progress(watchdog: Watchdog) -> None:
    """Work outside of any phase for longer than the timeout, while NCCL always has something pending."""
    FakeNCCLRecorder(progresses=True).install()
    work_alone(watchdog, TIMEOUT_S + 4)


# For "none" and "hang" the test does the harm; see main for "hang".
FAULTS: dict[str, Callable[[Watchdog], None]] = {
    "end": end,
    "work-alone": work_alone,
    "spin": spin,
    "hold": hold_the_interpreter,
    "raise": raise_error,
    "bug": bug,
    "vanish": vanish,
    "disconnect": disconnect,
    "other-collective": other_collective,
    "nccl-hang": nccl_hang,
    "nccl-waits-for-rank-1": nccl_waits_for_rank_1,
    "nccl-progress": nccl_progress,
}


def sum_of_ones(watchdog: Watchdog) -> None:
    total = torch.ones(7)
    with watchdog.in_collective("all-reduce of the loss counts"):
        dist.all_reduce(total)
    assert total[0] == dist.get_world_size()


def loop(watchdog: Watchdog, rank: int) -> None:
    for step in itertools.count():
        watchdog.step = step
        if step == 7:
            pid = FOLDER / f"pid.rank{rank}"
            pid.write_text(str(os.getpid()))
            pid.rename(FOLDER / f"ready.rank{rank}")
            if FAULT == "early-end":
                end(watchdog) if rank == AT_FAULT else work_alone(watchdog, TIMEOUT_S + 4)
            elif FAULT in FAULTS and AT_FAULT in (rank, None):
                FAULTS[FAULT](watchdog)
        sum_of_ones(watchdog)
        time.sleep(0.01)


def tell_when_heard(watchdog: Watchdog, rank: int) -> None:
    counts: set[int] = set()  # of heartbeats with a step; before the second the first was written
    while len(counts) < 2 or (rank and not (0 in watchdog._peers and watchdog._peers[0].heartbeat.step)):
        if watchdog._heartbeat.step:
            counts.add(watchdog._heartbeat.count)
        time.sleep(0.01)
    (FOLDER / f"heard.rank{rank}").touch()


def main() -> None:
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=START_TIMEOUT)))
    # In a collective that hangs in a device, no timeout of the backend frees the main thread.
    timeout = timedelta(seconds=600 if FAULT == "hang" else TIMEOUT_S)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{each}" for each in range(world_size)], START_TIMEOUT)  # the group waits for TIMEOUT_S only
    group = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world_size, timeout=timeout)
    if "FAR" in os.environ:
        exit_files.machine_id = lambda: f"machine {rank}"
    watchdog = Watchdog(store, rank, world_size, TIMEOUT_S)
    watchdog.start()
    watchdog.folder = FOLDER
    threading.Thread(target=tell_when_heard, args=(watchdog, rank), daemon=True).start()
    error: BaseException | None = None
    try:
        loop(watchdog, rank)
    except Finished:
        pass
    except BaseException as caught:
        error = caught
        raise
    finally:
        code, cause = exit_code_and_cause(error)
        if code:
            watchdog.fail(code, cause)
        write_exit(FOLDER, rank, watchdog.step, code, cause)
        watchdog.close()


if __name__ == "__main__":
    output = os.open(FOLDER / f"output{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the trainer, which ends after the step at hand
    try:
        status = run_command(main)
    except Exception:
        traceback.print_exc()
        status = 1
    exit_process(status)
