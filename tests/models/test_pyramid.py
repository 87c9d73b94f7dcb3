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
from attngeo.training.seeding import reproducible
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


@pytest.mark.parametrize("image_size", [(96, 128), (225, 225)])
@pytest.mark.parametrize("kind", [*ATTENTION_KINDS, "laplacian convolved"])
def test_large_oblong_and_odd_images_are_taken(kind: str, image_size: tuple[int, int]) -> None:
    if kind in ("riemannian", "laplacian_exact") and image_size == (225, 225):
        image_size = (65, 65)  # quadratic: 12769 tokens would only take long
    options = {"landmark_map": "convolution"} if kind.endswith("convolved") else {}
    model = timm.create_model(
        "laplacianformer_nano", num_classes=10, attention=kind.split()[0], attention_options=options
    ).eval()
    with torch.inference_mode():
        out = model(torch.randn(1, 3, *image_size))
    assert out.shape == (1, 10)
    assert out.isfinite().all()


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


def test_each_stage_runs_the_kind_that_is_named_for_it() -> None:
    kinds = ("laplacian", "linear_injective", "softmax")
    for attention in (",".join(kinds), kinds, list(kinds)):
        model = timm.create_model(
            "laplacianformer_micro", attention=attention, attention_options={"lambda_": 2.0, "feature_map": "relu"}
        )
        assert model.attention_kinds() == kinds
    first, second, third = (stage.blocks[0] for stage in model.stages)
    assert (first.attention.lambda_, second.attention.feature_map) == (2.0, "relu")
    # One projection for queries and keys is paid back to the MLP, in its own stage alone.
    assert [block.feed_forward.fc1.out_features for block in (first, second, third)] == [144, 256, 512]
    with pytest.raises(UserError, match="'laplacian' or 'linear_injective' or 'softmax' has no option 'lamda'"):
        timm.create_model("laplacianformer_micro", attention=kinds, attention_options={"lamda": 2.0})
    with pytest.raises(UserError, match="names 2 kinds for 3 stages"):
        timm.create_model("laplacianformer_micro", attention=kinds[:2])


def test_the_default_initialisation_is_torch_s_and_leaves_metrics_and_scales() -> None:
    torch.manual_seed(1)
    model = timm.create_model("fiberformer_micro", num_classes=10, init="default")
    drawn = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    bounds = [weight[0].numel() ** -0.5 for weight in drawn if weight.shape[0] == 512]
    assert bounds
    assert all(
        0.9 * bound < weight.abs().max() <= bound
        for weight, bound in zip((w for w in drawn if w.shape[0] == 512), bounds, strict=True)
    )
    assert all((stage.blocks[0].attention.token_metric.diagonal.weight == 0).all() for stage in model.stages)
    assert model.head.weight.abs().max() > 0.08  # 0.02 would stay below, and 1 / sqrt(128) is 0.088
    laplacian = timm.create_model("laplacianformer_nano", init="default")
    assert (laplacian.stages[0].blocks[0].attention.scale == 1).all()
    with pytest.raises(UserError, match="init is 'xavier'"):
        timm.create_model("laplacianformer_nano", init="xavier")


def test_convolved_landmarks_take_their_stride_from_the_image_size() -> None:
    options = {"landmark_map": "convolution"}
    tiny = timm.create_model("laplacianformer_tiny", attention_options=options)
    strides = [stage.blocks[0].attention.landmark_convolution.stride for stage in tiny.stages]
    assert strides == [(8, 8), (4, 4), (2, 2), (1, 1)]
    oblong = timm.create_model("laplacianformer_nano", img_size=(33, 8), attention_options=options)
    assert oblong.stages[0].blocks[0].attention.landmark_convolution.stride == (8, 2)


@pytest.mark.parametrize("images", [(32, 32), (33, 47)])
def test_intermediates_are_the_stages_maps_for_dense_prediction(images: tuple[int, int]) -> None:
    model = timm.create_model("laplacianformer_micro", num_classes=10).eval()
    x = torch.randn(2, 3, *images)
    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, model.forward_features(x))
    assert torch.equal(maps[-1], final)
    for found, info in zip(maps, model.feature_info, strict=True):
        rows, columns = (-(-side // info["reduction"]) for side in images)
        assert found.shape == (2, info["num_chs"], rows, columns)
    assert [m.shape for m in model.forward_intermediates(x, indices=[0, -1], intermediates_only=True)] == [
        maps[0].shape,
        maps[2].shape,
    ]
    stopped, early = model.forward_intermediates(x, indices=[1], stop_early=True)
    assert torch.equal(early[0], maps[1])
    assert torch.equal(stopped, maps[1])
    with pytest.raises(ValueError, match="NCHW"):
        model.forward_intermediates(x, output_fmt="NLC")
    features = timm.create_model("laplacianformer_micro", features_only=True, out_indices=(0, 1)).eval()
    assert (features.feature_info.channels(), features.feature_info.reduction()) == ([32, 64], [2, 4])
    features.model.load_state_dict(model.state_dict(), strict=False)
    assert all(torch.equal(found, expected) for found, expected in zip(features(x), maps[:2], strict=True))
    assert len(timm.create_model("softmaxformer_nano", features_only=True)(x)) == 2


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
        ("gaussianformer", {"form": "soft++", "landmark_map": "convolution"}),
        ("laplacianformer", {"learn_lambda": True, "attention": "laplacian_exact"}),
        ("laplacianformer", {"attention": "linear_injective", "feature_map": "exp"}),
        ("laplacianformer", {"attention": "softmax_sr"}),
    ],
)
def test_gradients_reach_every_parameter(family: str, options: dict[str, object]) -> None:
    attention = options.get("attention")
    options = {name: value for name, value in options.items() if name != "attention"}
    model = timm.create_model(f"{family}_nano", num_classes=10, attention=attention, attention_options=options)
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


@pytest.mark.parametrize("kind", list(ATTENTION_KINDS))
def test_twenty_deterministic_steps_of_every_kind_have_the_same_bits_again(kind: str) -> None:
    """An operator without a deterministic form would raise."""

    def steps() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = timm.create_model("fiberformer_nano", num_classes=10, attention=kind, drop_path_rate=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, 3, 28, 28)), torch.arange(4)).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    with reproducible(threads=2):
        assert all(torch.equal(first, second) for first, second in zip(steps(), steps(), strict=True))


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ATTENTION_KINDS),
        ("laplacian", {"shared_query_key": False, "separate_landmarks": True, "statistics": "batch"}),
        ("laplacian", {"landmark_map": "convolution", "learn_lambda": True, "learn_scale": False}),
    ],
)
def test_the_whole_model_compiles_into_one_graph(kind: str, options: dict[str, object]) -> None:
    if kind in ("laplacian", "gaussian"):
        options = {"iterations": 3, **options}  # unrolled where naive, so that many would only take long to trace
    model = timm.create_model("laplacianformer_nano", num_classes=10, attention=kind, attention_options=options)
    images = torch.randn(2, 3, 32, 32)
    torch._dynamo.reset()  # as many models as there are kinds are more than torch compiles of one forward
    # The graphs of the backward pass are traced for the kinds whose operators have their own.
    compiled = torch.compile(
        model, fullgraph=True, backend="aot_eager" if kind in ("laplacian", "riemannian") else "eager"
    )
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


@pytest.mark.parametrize("name", ["auto", "naive"])
def test_tokens_far_from_their_landmarks_leave_logits_and_gradients_finite(name: str) -> None:
    """Rows of `row_sum` whose kernel values all underflow attend to all tokens alike."""
    options = {"normalization": "row_sum", "backend": name}
    model = timm.create_model("laplacianformer_nano", num_classes=3, attention_options=options).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("attention.query.weight"):
            parameter.data.mul_(1e4)
    logits = model(torch.randn(2, *model.default_cfg["input_size"], generator=torch.Generator().manual_seed(1)))
    assert logits.isfinite().all()
    logits.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
