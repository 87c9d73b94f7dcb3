"""MLflow's own pages, in a real browser: four trainings side by side, their parameters and their curves."""

import importlib.util
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attngeo.tracking.mlflow_run import MlflowObserver
from tests.browser import Browser
from tests.mlflow_server import free_port, serving
from tests.workflow.project_copy import ROOT

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(600)]

KINDS = ("gaussian", "laplacian", "riemannian", "softmax")
PAGE_S = 120.0  # a page of some megabytes of JavaScript, on a busy machine
SETTLED_S = 2.0
SCREENSHOTS = Path(os.environ.get("ATTNGEO_SCREENSHOTS", ROOT / "results" / "screenshots"))


def load_ui() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ui", ROOT / "tools" / "ui.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The address of a server, and four trainings that were sent to it while it ran."""
    root = tmp_path_factory.mktemp("ui")
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        with serving(root / "server", port) as address:
            for place, kind in enumerate(KINDS):
                train(root, kind, place)
            yield address, load_ui().newest_trainings_of_server("demo")
    shutil.rmtree(root, ignore_errors=True)


def train(root: Path, kind: str, place: int) -> None:
    """Record a training as the loop does: parameters, four epochs and the result."""
    tags = {"attngeo.kind": "training", "attngeo.preset": "demo", "attngeo.seed": "0"}
    observer = MlflowObserver(root, "LaplacianFormer", f"{kind}-s0", tags, root / "scratch" / kind)
    same: dict[str, Any] = {"preset": "demo", "run_id": f"{kind}-s0", "dataset": "fashion-mnist", "seed": 0}
    params = same | {"model": f"{kind}former_nano", "attention": kind, "lr": 0.003}
    observer.on_start(params, resumed=False)
    for epoch in range(1, 5):
        observer.on_epoch({"epoch": epoch, "step": 157 * epoch, "val_top1": 60.0 + 5 * place + epoch})
    observer.on_end(params | {"status": "FINISHED", "accuracy": 64.0 + 5 * place, "epochs": 4})


def test_the_page_of_make_ui_compares_four_trainings(
    browser: Browser, served: tuple[str, list[tuple[str, str]]]
) -> None:
    address, trainings = served
    assert len(trainings) == 4
    with browser.page(load_ui().comparison_link(address, trainings), width=1500, height=1100) as page:
        words = ["Comparing 4 Runs", "val_top1", "fashion-mnist", *(f"{kind}former_nano" for kind in KINDS)]
        shows_all = f"{json.dumps(words)}.every(word => document.body.innerText.includes(word))"
        page.wait_for(shows_all, PAGE_S)
        time.sleep(SETTLED_S)  # the page loads parts of itself again
        page.wait_for(shows_all, PAGE_S)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(SCREENSHOTS / "mlflow-compare.png", whole=True)
        outside = [url for url in page.requests if not url.startswith((address, "data:", "blob:"))]
        assert outside == []


def test_curves_have_epochs_and_training_steps_to_choose_as_their_axis(
    browser: Browser, served: tuple[str, list[tuple[str, str]]]
) -> None:
    address, trainings = served
    with browser.page(load_ui().curves_link(address, trainings), width=1500, height=1000) as page:
        page.wait_for("document.querySelectorAll('.scatterlayer .trace .js-line').length >= 4", PAGE_S)
        assert page.evaluate("document.querySelector('.xtitle').textContent") == "Step"
        page.screenshot(SCREENSHOTS / "mlflow-curves.png")
    from attngeo.tracking.mlflow_store import client

    store = client(Path())
    run, _ = trainings[0]
    for axis, values in (("epoch", [1, 2, 3, 4]), ("step", [157, 314, 471, 628])):
        assert [point.value for point in store.get_metric_history(run, axis)] == values
