"""A process that records a run in MLflow, for tests that race or kill it.

python -m tests.unit.tracking_writer ROOT NAME EPOCHS [SECONDS_BEFORE_THE_END]
"""

import sys
import time
from pathlib import Path

from attngeo.tracking.mlflow_run import MlflowObserver

if __name__ == "__main__":
    root, name, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    observer = MlflowObserver(root, "LaplacianFormer", name, {"kind": "test"}, root / "scratch" / name)
    observer.on_start({"lr": 0.1, "run": name}, resumed=False)
    for epoch in range(1, epochs + 1):
        observer.on_epoch({"epoch": epoch, "train_loss": 1 / epoch, "val_top1": 10.0 * epoch})
    print(observer.run_id, flush=True)
    if len(sys.argv) > 4:
        time.sleep(float(sys.argv[4]))
    observer.on_end({"epochs": epochs, "accuracy": 10.0 * epochs, "status": "FINISHED"})
