"""Write the records of a run at high speed, with the lock and the `Tracker` of a training, and resume it after a kill.

Arguments: run folder, last step, mean seconds of a step, and trackers whose bridges to start. The file `saved` stands
for the checkpoints.
"""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path

from mmldlm.telemetry.tracker import Tracker
from mmldlm.telemetry.tracker_bridges import start_bridges
from mmldlm.utils.files import write_atomically
from mmldlm.utils.lock import RunLock


def main(run_dir: Path, steps: int, step_s: float, trackers: list[str]) -> None:
    saved = run_dir / "saved"
    with RunLock(run_dir):
        first = int(saved.read_text()) if saved.exists() else 0
        resumed = (run_dir / "metrics.jsonl").exists()
        (run_dir / "config.yaml").write_text("run: {seed: 3}\ntrain: {steps: 8}\nfreeze: [backbone]\n")
        with Tracker(run_dir, steps, first, resumed, enabled=True, tensorboard=False) as tracker:
            tracker.start({"engine": "single", "world_size": 1, "parameters_total": 7, "git": "abc"})
            start_bridges(run_dir, trackers)  # type: ignore[arg-type]
            for step in range(first + 1, steps + 1):
                time.sleep(random.expovariate(1 / step_s))
                loss = math.nan if step % 13 == 0 else random.gauss(3, 1)
                tracker.train(step, {"loss/total": loss, "optim/lr": 1e-3 / step, "data/epoch/a+b": step / 7})
                if step % 5 == 0:
                    tracker.validation(step, {"validation/total": random.random(), "weights": "ema"})
                if step % 10 == 0:
                    tracker.quality(step, {"quality/l2t_bleu": random.random()})
                if step % 20 == 0 or step == steps:
                    tracker.heartbeat(step, "saving")
                    write_atomically(saved, str(step))
                    tracker.event("checkpoint", step, {"path": "saved", "seconds": 0.1})
            tracker.end(steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
