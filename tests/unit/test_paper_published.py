"""Published numbers are what the papers' readers noted, and say whose they are."""

import pytest

from attngeo.paper.results import read_published

TABLES = ["imagenet", "coco", "solver_ablation", "lambda_ablation", "kernel_timings", "replication"]


def value(table, column, **labels):
    """The one number with these labels."""
    frame = read_published(f"{table}.csv")
    for name, label in labels.items():
        frame = frame[frame[name] == label]
    (number,) = frame[column]
    return number


@pytest.mark.parametrize(
    ("model", "top1", "params", "gmac"),
    [
        ("LaplacianFormer-T", 81.4, 12.1, 2.1),
        ("LaplacianFormer-M", 85.3, 46.3, 7.43),
        ("LaplacianFormer-H", 85.8, 78.5, 15.5),
        ("SOFT-T", 79.3, 13, 1.9),
        ("SOFT-H", 83.3, 87, 16.3),
        ("InLine-PVT-L", 83.6, 50.2, 10.2),
        ("BiFormer-T", 81.4, 13.1, 2.2),
        ("MLLA-B", 85.3, 96, 16.2),
    ],
)
def test_imagenet_numbers(model, top1, params, gmac):
    for column, expected in (("top1_pct", top1), ("parameters_m", params), ("gmac", gmac)):
        assert value("imagenet", column, model=model) == expected


@pytest.mark.parametrize(
    ("table", "column", "labels", "expected"),
    [
        ("imagenet", "top1_pct", {"model": "SOFT++-M"}, 83.1),
        ("coco", "ap_box", {"model": "LaplacianFormer-T", "detector": "Mask R-CNN 1x"}, 43.2),
        ("coco", "ap_mask", {"model": "LaplacianFormer-M", "detector": "Mask R-CNN 1x"}, 43.5),
        ("coco", "ap_box", {"model": "SOFT++-M", "detector": "RetinaNet"}, 44.3),
        ("solver_ablation", "top1_pct", {"solver": "conjugate gradient", "size": "S"}, 81.4),
        ("lambda_ablation", "top1_pct", {"lambda": 8.0}, 78.5),
        ("replication", "top1_high_pct", {"dataset": "CIFAR-100 at 224", "attention": "laplacian"}, 60.2),
    ],
)
def test_other_numbers(table, column, labels, expected):
    assert value(table, column, **labels) == expected


@pytest.mark.parametrize(
    ("n", "operation", "direction", "implementation", "time_ms"),
    [
        (128, "Newton-Schulz", "forward", "CUDA", 1.12),
        (64, "Newton-Schulz", "backward", "torch", 3.98),
        (16, "L1 distance", "backward", "torch", 0.20),
        (128, "L1 distance", "backward", "CUDA", 0.03),
    ],
)
def test_kernel_timings(n, operation, direction, implementation, time_ms):
    labels = {"n": n, "operation": operation, "direction": direction, "implementation": implementation}
    assert value("kernel_timings", "time_ms", **labels) == time_ms


@pytest.mark.parametrize("table", TABLES)
def test_every_row_names_its_source_and_kind(table):
    frame = read_published(f"{table}.csv")
    assert frame["source"].str.len().gt(5).all()
    assert set(frame["kind"]) <= {"paper", "derived", "public"}


def test_counts_of_ours_are_never_marked_as_the_papers():
    frame = read_published("imagenet.csv")
    counted = frame["source"].str.contains("our reading")
    assert set(frame.loc[counted, "kind"]) == {"derived"}
    assert frame.loc[counted, "top1_pct"].isna().all()
