"""Laws of the backbone for every family."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from attngeo.errors import UserError
from attngeo.layers.registry import ATTENTION_KINDS
from attngeo.models.names import FAMILIES, SIZES
from attngeo.models.pyramid import solver_residuals
from attngeo.ops import backend
from tests.tolerances import AUTOCAST_AGREEMENT, BATCH_INDEPENDENCE, COMPILED_AGREEMENT, GAUSSIAN_START_RESIDUAL

IMAGE_SIZES = [(32, 32), (28, 28), (33, 47), (1, 1)]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("image_size", IMAGE_SIZES)
@pytest.mark.parametrize("size", ["nano", "micro"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_any_image_size_trains(family: str, size: str, image_size: tuple[int, int]) -> None:
    model = timm.create_model(f"{family}_{size}", num_classes=10)
    out = model(torch.randn(2, 3, *image_size))
    F.cross_entropy(out, torch.tensor([1, 7])).backward()
    assert out.shape == (2, 10)
    assert out.isfinite().all()
    assert all(grad is not None and grad.isfinite().all() for grad in gradients(model).values())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_empty_batch_gives_an_empty_answer(family: str) -> None:
    assert timm.create_model(f"{family}_nano", num_classes=10)(torch.zeros(0, 3, 32, 32)).shape == (0, 10)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_nan_comes_out_as_nan(family: str) -> None:
    out = timm.create_model(f"{family}_nano", num_classes=10)(torch.full((1, 3, 32, 32), torch.nan))
    assert out.isnan().all()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_kind_of_the_name_runs_in_every_stage(family: str) -> None:
    model = timm.create_model(f"{family}_micro")
    assert model.attention_kinds() == (FAMILIES[family],) * 3
    for kind in ATTENTION_KINDS:
        assert timm.create_model(f"{family}_nano", attention=kind).attention_kinds() == (kind, kind)


def test_every_family_and_size_is_a_timm_model() -> None:
    for family in FAMILIES:
        assert {f"{family}_{size}" for size in SIZES} <= set(timm.list_models(f"{family}_*"))
    assert timm.create_model("fiberformer_nano").default_cfg["input_size"] == (3, 32, 32)
    assert (
        timm.create_model("laplacianformer_nano", img_size=48, in_chans=1)(torch.randn(1, 1, 48, 48)).shape[1] == 1000
    )


def test_asking_for_pretrained_weights_is_an_error_not_a_random_model() -> None:
    with pytest.raises(RuntimeError, match="pretrained"):
        timm.create_model("laplacianformer_nano", pretrained=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", list(ATTENTION_KINDS))
def test_an_image_s_output_does_not_depend_on_its_batch_mates(kind: str, training: bool) -> None:
    model = timm.create_model("fiberformer_nano", num_classes=10, attention=kind).train(training)
    images = torch.randn(5, 3, 28, 20)
    together, changed = model(images), torch.cat([images[:1], 100 * images[1:]])
    torch.testing.assert_close(model(images[:1]), together[:1], rtol=0, atol=BATCH_INDEPENDENCE)
    torch.testing.assert_close(model(changed)[:1], together[:1], rtol=0, atol=BATCH_INDEPENDENCE)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("laplacianformer", {"shared_query_key": False}),
        ("gaussianformer", {"shared_query_key": False, "normalization": "injective", "local_convolution": True}),
        ("fiberformer", {"metric": "mean", "metric_per_head": True}),
    ],
)
def test_gradients_reach_every_parameter(family: str, options: dict[str, object]) -> None:
    model = timm.create_model(f"{family}_nano", num_classes=10, attention_options=options)
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8)).backward()
    missing = [name for name, grad in gradients(model).items() if grad is None or not grad.abs().max() > 0]
    assert missing == []


@pytest.mark.parametrize("kind", list(ATTENTION_KINDS))
def test_a_bfloat16_autocast_step_stays_near_float32(kind: str) -> None:
    model = timm.create_model("fiberformer_nano", num_classes=10, attention=kind)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    full = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(images)
        loss = F.cross_entropy(half, labels)
    loss.backward()
    assert all(grad is not None and grad.isfinite().all() for grad in gradients(model).values())
    torch.testing.assert_close(half.float(), full, rtol=AUTOCAST_AGREEMENT, atol=AUTOCAST_AGREEMENT)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_same_seed_gives_the_same_bits(family: str) -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = timm.create_model(f"{family}_nano", num_classes=10, drop_path_rate=0.3)
        F.cross_entropy(model(torch.randn(4, 3, 28, 28)), torch.arange(4)).backward()
        return [tensor for parameter in model.parameters() for tensor in (parameter.detach(), parameter.grad)]

    assert all(torch.equal(first, second) for first, second in zip(step(), step(), strict=True))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_weights_survive_safetensors(family: str, tmp_path: Path) -> None:
    model = timm.create_model(f"{family}_nano", num_classes=10)
    model(torch.randn(1, 3, 32, 32))  # a forward notes its residual, which must not become a weight
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    other = timm.create_model(f"{family}_nano", num_classes=10)
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    images = torch.randn(2, 3, 28, 28)
    assert torch.equal(model(images), other(images))
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("kind", ["laplacian", "riemannian"])
def test_the_whole_model_compiles_into_one_graph(kind: str) -> None:
    options = {"iterations": 3} if kind == "laplacian" else {}  # unrolled, so that many would only take long to trace
    model = timm.create_model("laplacianformer_nano", num_classes=10, attention=kind, attention_options=options)
    images = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images), rtol=0, atol=COMPILED_AGREEMENT)
    compiled(images).sum().backward()
    if kind == "laplacian":
        assert solver_residuals(model) is not None


@pytest.mark.parametrize("kind", ["laplacian", "riemannian"])
def test_activation_checkpointing_changes_no_gradient(kind: str) -> None:
    model = timm.create_model("fiberformer_micro", num_classes=10, attention=kind, drop_path_rate=0.5)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(5)
        F.cross_entropy(model(images), labels).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*found, strict=True))


def test_the_head_can_be_replaced_and_left_out() -> None:
    model = timm.create_model("softmaxformer_nano", num_classes=10)
    images = torch.randn(2, 3, 32, 48)
    features = model.forward_features(images)
    assert features.shape == (2, 32, 8, 12)
    assert model.forward_head(features, pre_logits=True).shape == (2, 32)
    model.reset_classifier(3)
    assert model(images).shape == (2, 3)
    assert model.get_classifier().out_features == model.num_classes == 3
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), features.mean((2, 3)))
    with pytest.raises(ValueError, match="classifier"):
        model.reset_classifier(3, global_pool="")


def test_a_demand_for_an_implementation_reaches_kernel_and_solver() -> None:
    if backend.why_not_compiled("laplacian_kernel", [torch.ones(1)]):
        pytest.skip(backend.why_not_compiled("laplacian_kernel", [torch.ones(1)]))
    inverses = {"newton_schulz": "newton_schulz_inverse", "cholesky": "spd_inverse"}
    for family in ("laplacian", "gaussian"):
        for solver, inverse in inverses.items():
            for name in ("compiled", "naive"):
                backend.forget()
                options = {"backend": name, "solver": solver}
                model = timm.create_model(f"{family}former_nano", num_classes=10, attention_options=options)
                model(torch.randn(2, 3, 32, 32)).sum().backward()
                for operator in (f"{family}_kernel", inverse):
                    assert backend.ran()[operator].startswith(f"{name} cpu")
                    assert " + " not in backend.ran()[operator]
    looped = timm.create_model("gaussianformer_nano", attention_options={"backend": "compiled", "backward": "loop"})
    with pytest.raises(UserError, match="backward='loop'"):
        looped(torch.randn(1, 3, 32, 32))


def test_the_gaussian_solver_has_converged_at_the_start_of_training() -> None:
    images = torch.randn(8, 3, 32, 32)
    residuals = {}
    for start in ("identity", "paper"):
        torch.manual_seed(0)
        model = timm.create_model("gaussianformer_micro", attention_options={"start": start})
        model(images)
        residuals[start] = solver_residuals(model)
    assert timm.create_model("gaussianformer_nano").stages[0].blocks[0].attention.start == "identity"
    assert residuals["identity"] < GAUSSIAN_START_RESIDUAL < residuals["paper"]


def test_residuals_are_reported_for_solving_kinds_alone_and_never_hidden() -> None:
    softmax, laplacian = (timm.create_model(f"{family}_nano") for family in ("softmaxformer", "laplacianformer"))
    assert solver_residuals(softmax) is None
    assert solver_residuals(laplacian) is None
    softmax(torch.randn(1, 3, 8, 8))
    laplacian(torch.randn(1, 3, 32, 32))
    assert solver_residuals(softmax) is None
    assert 0 < solver_residuals(laplacian) < 1
    laplacian(torch.full((1, 3, 32, 32), torch.nan))
    assert not solver_residuals(laplacian) < 1
