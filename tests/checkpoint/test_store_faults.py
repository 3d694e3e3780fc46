"""Full disks, kills and concurrent readers: real processes on real files."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from tests.helpers.save_checkpoint import save_checkpoint
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

FILES = {f"file-{i}": bytes(1000) for i in range(3)}

FULL_DISK = """
import sys
from pathlib import Path
import torch
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.checkpoint.tensors import write_tensors
from mmldlm.errors import StorageError
from tests.helpers.save_checkpoint import save_checkpoint
store = CheckpointStore(Path(sys.argv[1]), Retention(last=3))
save_checkpoint(store, 1, {"a": bytes(1_000_000)}, {})
for files in ({"a": lambda path: path.write_bytes(bytes(9_000_000))},
              {"a": lambda path: write_tensors(path, {"w": torch.zeros(3_000_000)})},
              {"a": bytes(9_000_000)}):
    try:
        save_checkpoint(store, 2, files, {})
    except StorageError as error:
        print("refused:", error, "exit", int(error.exit_code))
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"], list(store.folder.iterdir())
    assert store.newest().step == 1
save_checkpoint(store, 2, {"a": bytes(1_000_000)}, {})
"""


def test_full_disk_leaves_the_old_ones_intact(tmp_path):
    script = tmp_path / "full_disk.py"
    script.write_text(FULL_DISK)
    mount = f"mount -t tmpfs -o size=4m none {tmp_path}/disk"
    (tmp_path / "disk").mkdir()
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here: unshare -Urm is refused")
    command = f"{mount} && exec {sys.executable} {script} {tmp_path}/disk/checkpoints"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", command], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(line.endswith("exit 74") for line in lines)
    assert "No space left" in lines[0] and "No space left" in lines[1] and "MiB needed" in lines[2]


def test_killed_writer_leaves_a_valid_checkpoint(tmp_path):
    generator, kills_inside, last = random.Random(0), 0, 0
    store = CheckpointStore(tmp_path, Retention(last=1))
    save_checkpoint(store, 0, FILES, {})
    for number in range(30):
        list_files = store.paths if number % 2 else tmp_path.iterdir
        old = set(list_files())
        child = os.fork()
        if not child:
            # A fresh child resumes from what it finds, as a restarted run does.
            try:
                writer = CheckpointStore(tmp_path, Retention(last=1))
                step = writer.newest().step
                while True:
                    step += 1
                    payload = f"{step}".encode() * 20_000
                    save_checkpoint(writer, step, {f"file-{i}": payload for i in range(4)}, {})
            finally:
                os._exit(1)
        # However slow the child is, every other one has saved a checkpoint before it is killed.
        wait_until(lambda old=old, list_files=list_files: set(list_files()) != old, "the child's first file")
        time.sleep(generator.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child must not have failed by itself"
        kills_inside += any(name.startswith(".") for name in [path.name for path in tmp_path.iterdir()])
        checkpoint = store.newest(repair=False)
        assert not [name for name in [path.name for path in tmp_path.iterdir()] if name.startswith("damaged")]
        assert checkpoint.step >= last
        last = checkpoint.step
    assert last > 5 and kills_inside > 0, "the kills must hit saves"


def test_concurrent_reader_sees_complete_checkpoints(tmp_path, caplog):
    store = CheckpointStore(tmp_path, Retention(last=1))
    save_checkpoint(store, 0, FILES, {})
    child = os.fork()
    if not child:
        for step in range(1, 100_000):
            save_checkpoint(store, step, FILES, {})
    try:
        steps, deadline = [0], time.monotonic() + TEST_TIMEOUT_S
        while (len(steps) < 200 or steps[-1] < 20) and time.monotonic() < deadline:
            steps.append(store.newest(repair=False).step)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert steps == sorted(steps) and steps[-1] >= 20 and not caplog.records
