"""The comparison of solvers: every solver does what its name says, on the matrices that it says."""

import math

import pytest
import timm
import torch
from torch import Tensor

from attngeo.evaluation import solver_convergence as comparison
from attngeo.ops import newton_schulz_inverse

EPS = 0.01


def rows_of(rows: list[comparison.Row], metric: str, **labels: object) -> list[comparison.Row]:
    chosen = [row for row in rows if row["metric"] == metric]
    return [row for row in chosen if all(row.get(name) == value for name, value in labels.items())]


@pytest.mark.parametrize("size", [1, 2, 16, 49])
def test_matrices_have_the_condition_that_they_are_named_after(size: int) -> None:
    W = comparison.matrices_of_condition(5, size, 3, EPS)
    P = W.double() + EPS * torch.eye(size, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(P)
    assert torch.equal(P, P.mT)
    assert float((eigenvalues[:, -1] - 1.0).abs().max()) < 1e-5
    if size > 1:
        assert float((eigenvalues[:, 0] * 50 - 1.0).abs().max()) < 1e-4


def test_random_landmark_matrices_are_those_of_pooled_tokens() -> None:
    W = comparison.random_landmark_matrices(3, 16, 0)
    assert W.shape == (3, 16, 16)
    assert torch.equal(W.diagonal(dim1=-2, dim2=-1), torch.ones(3, 16))
    assert torch.equal(W, comparison.random_landmark_matrices(3, 16, 0))
    assert not torch.equal(W, comparison.random_landmark_matrices(3, 16, 1))
    with pytest.raises(ValueError, match="15 is no square"):
        comparison.random_landmark_matrices(3, 15, 0)


@pytest.mark.parametrize("shared", [True, False])
def test_trained_matrices_are_those_that_the_solvers_invert(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    model = timm.create_model("laplacianformer_nano", num_classes=3)
    if not shared:
        for module in model.modules():
            if hasattr(module, "landmark_matrix"):
                module.key = torch.nn.Linear(module.dim, module.dim)
    inverted: list[Tensor] = []

    def noted(W: Tensor, *arguments: object, **options: object) -> object:
        inverted.append(W.flatten(0, -3))
        return newton_schulz_inverse(W, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("attngeo.layers.landmark.newton_schulz_inverse", noted)
    images = torch.randn(2, 3, 32, 32)
    found = comparison.trained_landmark_matrices(model, images)
    assert len(found) == len(inverted) > 1
    for one, other in zip(found, inverted, strict=True):
        assert torch.equal(one, other)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_evenly_chosen_takes_of_every_layer() -> None:
    layers = [torch.arange(count)[:, None, None].float() for count in (100, 1, 7)]
    chosen = comparison.evenly_chosen(layers, 12)
    assert [one.flatten().tolist() for one in chosen] == [[0, 33, 66, 99], [0], [0, 2, 4, 6]]
    assert [len(one) for one in comparison.evenly_chosen(layers, 1)] == [1, 1, 1]


def test_every_solver_is_measured_at_its_products_and_what_overflows_is_infinite() -> None:
    kinds = {
        "random": [comparison.random_landmark_matrices(4, 9, seed) for seed in (0, 1)],
        "mixed": [comparison.matrices_of_condition(2, size, 0, EPS) for size in (4, 9)],
    }
    rows = comparison.analyze(kinds, iterations=25, eps=EPS)
    found = rows_of(rows, "solver_residual", matrix="random", solver="newton_schulz")
    assert [row["products"] for row in found] == list(range(2, 51, 2))
    assert [row["iterations"] for row in found] == list(range(1, 26))
    assert {row["n"] for row in found} == {8}
    gradient = rows_of(rows, "solver_residual", matrix="random", solver="conjugate_gradient")
    assert [row["products"] for row in gradient] == list(range(1, 51))
    (printed,) = rows_of(rows, "solver_residual", matrix="random", solver="newton_schulz_printed", iterations=25)
    assert printed["value"] == math.inf
    assert printed["spread"] is None
    for solver in ("cholesky", "pinv"):
        (direct,) = rows_of(rows, "solver_residual", matrix="mixed", solver=solver)
        assert "products" not in direct
        assert direct["value"] < 1e-4
        assert direct["n"] == 4
    assert {row["landmarks"] for row in rows if row["matrix"] == "mixed"} == {"4 to 9"}
    for row in rows_of(rows, "solver_residual", matrix="random"):
        labels = {name: row.get(name) for name in ("matrix", "solver", "products")}
        low, high, largest = (
            rows_of(rows, f"solver_residual_{name}", **labels)[0]["value"]
            for name in ("lower_quartile", "upper_quartile", "largest")
        )
        assert low <= row["value"] <= high <= largest


def test_the_identity_start_needs_fewer_products() -> None:
    rows = comparison.analyze({"kappa_50": [comparison.matrices_of_condition(4, 16, 0, EPS)]}, iterations=20, eps=EPS)

    def first_below(solver: str) -> int:
        found = rows_of(rows, "solver_residual", solver=solver)
        return min(int(row["products"]) for row in found if row["value"] < 1e-2)

    assert first_below("newton_schulz_identity") < first_below("newton_schulz")
