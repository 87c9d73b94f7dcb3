"""The worked examples of the README and the guides run as they are written."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from attngeo.data import embedded
from tests.documents import GUIDES, example
from tests.workflow.project_copy import ProjectCopy

pytestmark = [pytest.mark.workflow, pytest.mark.network, pytest.mark.timeout(900)]


def run_example(copy: ProjectCopy, name: str) -> None:
    script = copy.root / f"example-{name}.sh"
    script.write_text("set -euo pipefail\n" + example(name))
    copy.run(f"bash {script.name}", timeout=600)


def test_own_images(finished_copy: ProjectCopy) -> None:
    draw = np.random.default_rng(0)
    for label, level in (("däns e", 60), ("thin's", 180)):
        folder = finished_copy.root / "my_images" / label
        folder.mkdir(parents=True)
        for index in range(60):
            pixels = draw.normal(level, 40, (48, 56, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.jpg")
    (finished_copy.root / "my_images/thin's/broken.jpg").write_bytes(b"not a JPEG")
    run_example(finished_copy, "own-images")
    table = pd.read_csv(finished_copy.root / "paper_figures/tab1.csv")
    assert table.astype(str).apply(lambda column: column.str.contains("my-images")).any().any()
    report = (finished_copy.root / "results/my-images/data/my-images/report.csv").read_text()
    assert "broken.jpg,refused" in report
    assert finished_copy.planned("--config preset=my-images") == []
    shutil.copy(finished_copy.root / "my_images/thin's/0.jpg", finished_copy.root / "my_images/thin's/one more.jpg")
    again = finished_copy.planned("--config preset=my-images")
    assert any(job.startswith("pack") for job in again), "a new image must be packed"
    run_example(finished_copy, "by-hand")
    run = finished_copy.root / "results/my-images/runs/softmax"
    assert json.loads((run / "final.json").read_text())["world_size"] == 2
    assert {path.name for path in (run / "evaluations").glob("*.json")} == {
        "my-images-val-32.json",
        "my-images-val-48.json",
    }
    assert {path.name for path in (finished_copy.root / "exported").iterdir()} == {"config.json", "model.safetensors"}


def test_own_decoders(finished_copy: ProjectCopy) -> None:
    run_example(finished_copy, "own-decoders")
    results = finished_copy.root / "results/my-decoders"
    models = [f"decoder-{size}-s0-step{step}" for size in ("tiny", "small") for step in (0, 5, 20)]
    assert {path.stem for path in (results / "analyses/connection_walk").glob("*.json")} == set(models)
    for size in ("tiny", "small"):
        final = json.loads((results / f"decoders/{size}-s0/final.json").read_text())
        assert final["status"] == "FINISHED"
    assert finished_copy.planned("--config preset=my-decoders") == []


def test_own_language_model(finished_copy: ProjectCopy) -> None:
    shutil.copytree(embedded.fetch("minilm-l3"), finished_copy.root / "my_model")
    run_example(finished_copy, "own-model")
    data = pd.read_csv(finished_copy.root / "results/my-model/figures/fig10.csv")
    assert set(data["model"]) == {"my-model"}
    assert Path(finished_copy.root / "paper_figures/fig10.pdf").stat().st_size > 0
    paths = pd.read_csv(finished_copy.root / "results/trajectories/my_model.csv")
    assert set(paths["model"]) == {"my_model"}
    assert paths["answer"].str.contains("than random walk").sum() == 2


def test_own_ablation(finished_copy: ProjectCopy) -> None:
    run_example(finished_copy, "own-ablation")
    table = pd.read_csv(finished_copy.root / "paper_figures/tab2.csv")
    ours = table[table["kind"] == "ours"].sort_values("lambda")
    assert ours["lambda"].tolist() == [1.0, 1.0, 4.0]
    assert set(ours["other options"].dropna()) == {"recipe.lr=0.001"}
    assert ours["difference"].isna().tolist() == [False, False, True]
    sheet = finished_copy.root / "config/my-ablation/runs.tsv"
    sheet.write_text(sheet.read_text().replace("lambda_=1\n", "lambda_=2\n"))
    planned = finished_copy.planned("--config preset=my-ablation")
    assert [job.split("/runs/")[1].split("/")[0] for job in planned if job.startswith("train")] == ["narrow"]


def test_own_attention_kind(finished_copy: ProjectCopy) -> None:
    run_example(finished_copy, "own-attention")
    curves = pd.read_csv(finished_copy.root / "results/my-attention/figures/fig2.csv")
    assert any("mean" in str(value).lower() for value in curves.to_numpy().ravel())
    models = re.search(r"In Python the models are timm's:\n\n```python\n(.*?)```", GUIDES["attention_kinds"], re.DOTALL)
    assert models
    (finished_copy.root / "models.py").write_text(models[1])
    finished_copy.run("python models.py")
    source = finished_copy.root / "my_attention.py"
    source.write_text(source.read_text().replace(".mean(1, keepdim=True)", ".amax(1, keepdim=True)"))
    planned = finished_copy.planned("--config preset=my-attention")
    trained = [job for job in planned if job.startswith("train")]
    assert len(trained) == 1, "an edit of the file retrains the run that uses it, and no other"
