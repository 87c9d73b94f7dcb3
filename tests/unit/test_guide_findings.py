"""The numbers in the README's and the guide's prose about what came out are those of the records in git."""

import json
import re

import pandas as pd
import pytest

from attngeo.paper import records
from attngeo.paper.decisions.fiber_bundle import ROUNDING
from attngeo.paper.intervals import mean_and_interval, student_half_width
from tests.documents import GUIDES, README, ROOT

STUDY = ROOT / "docs/measured/study"
REPLICATION = "ablation-laplacian-all5"
CHOICES = {  # row of the guide's table: run that makes one choice, run that makes all others
    "five solver iterations": ("ns5", "not-iterations"),
    "separate maps and landmarks": ("separate", "not-separate"),
    "whitening by statistics": ("batch", "not-batch"),
    "no 1/N scale": ("noscale", "not-noscale"),
    "PyTorch's initialisation": ("init", "not-init"),
}


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


GUIDE = flat(GUIDES["findings"])


def accuracies(run: str) -> pd.Series:
    """Top-1 of a run by its seed."""
    finals = [json.loads(path.read_text()) for path in STUDY.glob(f"runs/{run}-s*/final.json")]
    found = {f["seed"]: f["accuracy"] for f in finals if f["run_id"] == f"{run}-s{f['seed']}"}
    assert len(found) == 3, run
    return pd.Series(found).sort_index()


LAPLACIAN, SOFTMAX = accuracies("ablation-laplacian"), accuracies("ablation-softmax")
GAIN = accuracies("ablation-softmax-init") - SOFTMAX  # of softmax, by PyTorch's initialisation
ALL_FIVE = accuracies(REPLICATION) - LAPLACIAN - GAIN


def told(values: pd.Series, sign: str = "+") -> str:
    mean, _, half = mean_and_interval(list(values))
    return f"{mean:{sign}.1f} ± {half:.1f}"


@pytest.mark.parametrize("choice", CHOICES)
def test_the_table_of_choices_of_the_replication(choice: str) -> None:
    alone, others = (accuracies(f"ablation-laplacian-{run}") for run in CHOICES[choice])
    by_softmax = GAIN if "initialisation" in choice else 0.0
    without = others - LAPLACIAN - (0.0 if "initialisation" in choice else GAIN)
    row = next(line for line in GUIDES["findings"].splitlines() if line.startswith(f"| {choice}"))
    assert [cell.strip() for cell in row.split("|")[-3:-1]] == [
        told(alone - LAPLACIAN - by_softmax),
        told(without - ALL_FIVE),
    ]


def test_what_all_choices_do_together() -> None:
    own = accuracies(REPLICATION) - LAPLACIAN
    for document in (GUIDE, flat(README)):
        assert told(ALL_FIVE) in document
        assert f"({told(own)})" in document or f"({told(own)}," in document
    assert f"{accuracies(REPLICATION).mean():.1f} % after {LAPLACIAN.mean():.1f}" in GUIDE
    assert f"softmax gains {told(GAIN, '')} points" in GUIDE
    by_initialisation = accuracies(REPLICATION) - accuracies("ablation-laplacian-not-init")
    assert f"Laplacian with the other four choices does not ({told(by_initialisation)})" in GUIDE
    scaled = accuracies("ablation-laplacian-not-noscale") - accuracies("ablation-softmax-init")
    assert f"above softmax by {told(scaled, '')} points" in GUIDE
    broken = sorted(round(value) for value in accuracies("ablation-laplacian-not-iterations"))
    assert f"({broken[0]}, {broken[1]} and {broken[2]} %)" in GUIDE
    assert f"(without it {told(accuracies('ablation-laplacian-nolocal') - LAPLACIAN)} points)" in GUIDE


def test_isometry_by_size() -> None:
    frame = pd.read_csv(STUDY / "figures/fig11.csv")
    frame = frame[(frame["quantity"] == "isometry excess") & (frame["family"] == "decoder")]
    sizes = ["decoder-300k", "decoder-1m", "decoder-3m", "decoder-10m"]
    end = [f"{value:.2f}" for value in frame[frame["finished"]].set_index("size")["value"][sizes]]
    assert f"{end[0]}, {end[1]}, {end[2]} and {end[3]} at the end of training" in GUIDE
    early = frame[frame["step"] == 320].set_index("size")["value"][sizes]
    assert {f"{value:.2f}" for value in early[:3]} == {"-0.22"}
    assert f"three sizes are equal (-0.22) and only the largest differs ({early.iloc[3]:.2f};" in GUIDE
    assert f"correlation {early.reset_index(drop=True).corr(pd.Series([1.0, 2, 3, 4]), 'spearman'):.2f})" in GUIDE


def test_what_decoders_know_of_their_text_at_the_end() -> None:
    losses: dict[str, list[float]] = {}
    for path in sorted(STUDY.glob("decoders/*/metrics.jsonl")):
        last = json.loads(path.read_text().splitlines()[-1])
        losses.setdefault(path.parent.name.split("-")[0], []).append(last["val_loss"])
    large, small = losses["3m"] + losses["10m"], losses["300k"] + losses["1m"]
    said = f"held-out loss {min(large):.1f} to {max(large):.1f} nats a byte; {min(small):.1f} to {max(small):.1f} for"
    assert said in GUIDE


def test_rank_collapse() -> None:
    frames = [records.read(path) for path in sorted((STUDY / "analyses/rank_collapse").glob("*.json"))]
    frame = pd.concat(frames)
    kept = frame[frame["metric"] == "layers_kept"]
    more = {}
    for phase in ("wide 8", "wide 8 trained", "wide 16"):
        table = kept[kept["phase"] == phase].pivot_table(index="seed", columns="form", values="value")
        gained = list(table["heterogeneous"] - table.drop(columns="heterogeneous").max(axis=1))
        more[phase] = (table["heterogeneous"].mean(), sum(gained) / len(gained), student_half_width(gained))
    layers, mean, half = more["wide 16"]
    assert f"stay apart for {layers:.1f} layers, {mean:.1f} ± {half:.1f} more than" in GUIDE
    layers, mean, half = more["wide 8"]
    assert f"it is {layers:.1f} layers ({mean:+.1f} ± {half:.1f})" in GUIDE
    layers, mean, half = more["wide 8 trained"]
    assert f"after training from there {layers:.1f} ({mean:+.1f} ± {half:.1f})" in GUIDE
    losses = frame[(frame["metric"] == "task_loss") & (frame["wiring"] == "pure")]["value"]
    assert f"(losses of {losses.min():.2f} to {losses.max():.2f} nats" in GUIDE
    residuals = frame[(frame["metric"] == "relative_residual") & (frame["wiring"] == "pure")]
    left = residuals[residuals["value"] > ROUNDING].groupby("phase")["depth"].max() + 1  # of any metric and seed
    assert (left["init"], left["trained"]) == (3, 4)
    assert "to rounding behind three layers at the usual start, and behind four once trained" in GUIDE
    assert "loses all difference between tokens within four layers" in flat(README)
