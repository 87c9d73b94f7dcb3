"""Parameters and multiply-accumulates by the counting rule."""

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attngeo.evaluation.macs import count, count_macs
from tests.tolerances import DERIVED_MACS_RELATIVE, DERIVED_PARAMETERS_RELATIVE, MATCHED_PARAMETERS_RELATIVE


@pytest.mark.parametrize(
    ("size", "parameters_m", "gmac"),
    [("tiny", 12.06, 2.14), ("small", 25.8, 4.8), ("medium", 46.2, 7.6), ("large", 62.8, 11.1), ("huge", 78.5, 15.5)],
)
def test_published_sizes_count_as_derived_from_the_paper(size: str, parameters_m: float, gmac: float) -> None:
    model = timm.create_model(f"laplacianformer_{size}")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(
        parameters_m, rel=DERIVED_PARAMETERS_RELATIVE
    )
    assert count(model, 224).total / 1e9 == pytest.approx(gmac, rel=DERIVED_MACS_RELATIVE)


def test_solver_and_nystrom_products_of_tiny_are_those_derived() -> None:
    counted = count(timm.create_model("laplacianformer_tiny"), 224)
    assert counted.solver / 1e9 == pytest.approx(0.30, rel=DERIVED_MACS_RELATIVE)
    assert (counted.nystrom + counted.products) / 1e9 == pytest.approx(0.25, rel=DERIVED_MACS_RELATIVE)


def test_one_projection_for_queries_and_keys_saves_a_square_matrix_a_block() -> None:
    def parameters(shared: bool) -> int:
        return count(
            timm.create_model("laplacianformer_tiny", attention_options={"shared_query_key": shared}), 64
        ).parameters

    assert parameters(False) - parameters(True) == 2 * sum(dim * dim + dim for dim in (64, 128, 320, 512))


def test_micro_has_a_third_of_a_million_parameters() -> None:
    assert round(count(timm.create_model("laplacianformer_micro", num_classes=10), 32).parameters / 1e6, 2) == 0.36


@pytest.mark.parametrize("size", ["nano", "micro"])
def test_softmax_gaussian_and_laplacian_models_of_our_sizes_match_in_parameters(size: str) -> None:
    families = ("softmaxformer", "gaussianformer", "laplacianformer")
    models = {
        **{family: timm.create_model(f"{family}_{size}", num_classes=10) for family in families},
        "separate keys": timm.create_model(
            f"laplacianformer_{size}", num_classes=10, attention_options={"shared_query_key": False}
        ),
    }
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert max(counts.values()) <= (1 + MATCHED_PARAMETERS_RELATIVE) * min(counts.values()), counts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("softmax", {}),
        ("linear_injective", {}),
        ("gaussian", {"backend": "naive"}),
        ("laplacian", {"backend": "naive"}),
        ("laplacian", {"backend": "naive", "landmark_map": "convolution"}),
        ("laplacian_exact", {"backend": "naive"}),
        ("laplacian_exact", {"backend": "naive", "normalization": "row_sum"}),
    ],
)
def test_the_count_of_matrix_products_agrees_with_torch_s_own_counter(kind: str, options: dict[str, object]) -> None:
    model = timm.create_model("softmaxformer_micro", num_classes=10, attention=kind, attention_options=options).eval()
    counted = count(model, (32, 40))
    # torch counts scaled_dot_product_attention on a CPU only where it is made of matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 32, 40))
    products = counted.total + counted.nystrom + counted.solver
    # What is left are residuals, which are diagnosis, and row statistics of lower order.
    assert products == pytest.approx(counter.get_total_flops() / 2, rel=0.02)


def test_the_exact_kernel_counts_every_pair_and_twice_more_for_its_statistics() -> None:
    pairs = {"injective": 3, "none": 1}
    for normalization, passes in pairs.items():
        options = {"normalization": normalization}
        model = timm.create_model("laplacianformer_nano", attention="laplacian_exact", attention_options=options)
        assert count(model, (32, 24)).distance == passes * ((16 * 12) ** 2 * 16 + (8 * 6) ** 2 * 32)


def test_the_rule_is_the_same_for_every_implementation_and_counts_the_direct_solver() -> None:
    counts = {
        (solver, name): count(
            timm.create_model("laplacianformer_nano", attention_options={"solver": solver, "backend": name}), 32
        )
        for solver in ("newton_schulz", "cholesky")
        for name in ("auto", "naive")
    }
    assert counts["cholesky", "auto"] == counts["cholesky", "naive"]
    assert counts["newton_schulz", "auto"] == counts["newton_schulz", "naive"]
    assert counts["newton_schulz", "auto"].solver == 40 * counts["cholesky", "auto"].solver > 0


def test_counting_computes_nothing_and_leaves_the_model_alone() -> None:
    model = timm.create_model("laplacianformer_nano", num_classes=10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record = count_macs(model, (33, 47))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert all(layer.attention.solver_residual is None for stage in model.stages for layer in stage.blocks)
    assert record["gmac_with_apart"] > record["gmac"] > 0
    assert "|a - b|" in record["gmac_rule"]
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
