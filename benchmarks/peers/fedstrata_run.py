"""FedStrata: ``fedstrata.run`` of the workload's job, with the settings of ``$OVERRIDES`` laid over it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import fedstrata

if __name__ == "__main__":
    work, out = Path(os.environ["WORK"]), Path(os.environ["OUT"])
    overrides = [*os.environ.get("OVERRIDES", "").split(), f"output.dir={out / 'run'}"]
    result = fedstrata.run(work / "job.toml", overrides)
    lines = [json.loads(line) for line in (out / "run" / "rounds.jsonl").read_text("utf-8").splitlines()]
    trained = sum(line["seconds"] for line in lines if line["client"] != "server")
    shutil.copy(out / "run" / "model" / "model.safetensors", out / "final.safetensors")
    headline = json.loads((work / "workload.json").read_text("utf-8"))["headline"]
    summary = {"score": result.score[headline], "train_seconds": result.seconds, "epoch_seconds": trained}
    (out / "result.json").write_text(json.dumps(summary), "utf-8")
