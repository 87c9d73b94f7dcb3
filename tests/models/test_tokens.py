"""Cost of one attention layer against the number of tokens: what is measured, what is left out, what is fitted."""

import math
import os
import signal
from typing import Any

import pytest
import torch

from attngeo.evaluation import tokens
from attngeo.evaluation.apart import apart
from attngeo.evaluation.single_layer import build, draw_tokens, pass_of, square_grid
from attngeo.evaluation.token_sizes import FUSED_SOFTMAX, LAYER_KINDS, PASSES, PLAIN_SOFTMAX
from attngeo.layers.registry import ATTENTION_KINDS
from tests.tolerances import FUSED_SOFTMAX_FLOAT32

SHAPE: dict[str, Any] = {"heads": 1, "head_dim": 8, "landmarks": (3, 3)}
PATIENCE: dict[str, Any] = {"repeats": 2, "seconds": 0.01, "memory_mib": 500}
BOTH = PASSES[1]


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def value(rows: list[tokens.Row], metric: str) -> float:
    (found,) = (row["value"] for row in rows if row["metric"] == metric)
    return float(found)


def test_every_kind_is_there_and_softmax_twice() -> None:
    assert set(ATTENTION_KINDS) | {FUSED_SOFTMAX} == set(LAYER_KINDS)
    for kind in LAYER_KINDS:
        layer = build(kind, **SHAPE)
        x = draw_tokens("test", 2, 49, layer.dim)
        output, gradients = pass_of(layer, x, "forward")(), pass_of(layer, x, BOTH)()
        assert isinstance(output, torch.Tensor)
        assert output.shape == x.shape
        assert [gradient.shape for gradient in gradients] == [x.shape, *(p.shape for p in layer.parameters())]  # type: ignore[attr-defined]
        assert layer.kind == ("softmax" if kind == FUSED_SOFTMAX else kind)


def test_plain_and_fused_softmax_are_one_function() -> None:
    plain, fused = (build(kind, heads=3, head_dim=8, landmarks=(7, 7)) for kind in (PLAIN_SOFTMAX, FUSED_SOFTMAX))
    x = draw_tokens("test", 2, 121, plain.dim)
    results = [(pass_of(layer, x, "forward")(), *pass_of(layer, x, BOTH)()) for layer in (plain, fused)]  # type: ignore[misc]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=FUSED_SOFTMAX_FLOAT32 * float(other.abs().max()))


def test_tokens_fill_a_square() -> None:
    assert square_grid(121) == (11, 11)
    with pytest.raises(ValueError, match="120 tokens"):
        square_grid(120)


def test_plain_softmax_is_charged_for_its_maps_and_linear_attention_for_none() -> None:
    count = 1296
    map_mib = count**2 * 4 / 2**20
    found = {
        (kind, direction): value(apart(tokens.measure, kind, count, direction, **SHAPE, **PATIENCE), "peak_memory_mib")
        for kind in (PLAIN_SOFTMAX, FUSED_SOFTMAX, "linear_injective")
        for direction in PASSES
    }
    if math.isnan(found[PLAIN_SOFTMAX, BOTH]):
        pytest.skip("this system does not tell the peak")
    assert 2 * map_mib <= found[PLAIN_SOFTMAX, "forward"] < 2.6 * map_mib
    assert 3 * map_mib <= found[PLAIN_SOFTMAX, BOTH] < 3.6 * map_mib
    for kind in (FUSED_SOFTMAX, "linear_injective"):
        assert found[kind, BOTH] < 0.7 * map_mib


def test_a_pass_above_the_memory_is_left_out_and_larger_ones_are_not_tried() -> None:
    patience = PATIENCE | {"memory_mib": 12}
    cases = list(tokens.suite((2304, 64, 1296), (PLAIN_SOFTMAX,), (BOTH,), **SHAPE, **patience, longest_s=9))
    assert [rows[0]["tokens"] for rows in cases] == [64, 1296, 2304]
    assert value(cases[0], "time_ms") > 0
    assert [rows[0].get("why") for rows in cases[1:]] == [
        "it needs more than 12 MiB",
        "not tried: at 1296 tokens it needs more than 12 MiB",
    ]
    assert all(math.isnan(value(rows, "left_out")) for rows in cases[1:])


def test_after_a_pass_that_takes_too_long_larger_ones_are_not_tried() -> None:
    cases = list(tokens.suite((16, 64), ("linear_injective",), ("forward",), **SHAPE, **PATIENCE, longest_s=1e-9))
    assert value(cases[0], "time_ms") > 0
    assert cases[1][0]["why"].startswith("not tried: at 16 tokens a pass took 0.00 s of")


def test_a_process_that_is_killed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "measure", die)
    ((row,),) = tokens.suite((16,), ("laplacian",), ("forward",), **SHAPE, **PATIENCE, longest_s=1)
    assert row["why"] == "its process was killed, probably for want of memory"


def test_the_exponents_of_power_laws_are_found_over_the_rules_range_alone() -> None:
    rows = []
    for kind, power in (("softmax", 2.0), ("laplacian", 1.0)):
        for count in (64, 256, 1024, 2304, 4096, 16384, 65536):
            outside = 100.0 if count in (64, 256, 65536) else 1.0
            labels = {"attention": kind, "pass": BOTH, "tokens": count}
            rows.append(labels | {"metric": "time_ms", "value": outside * 1e-4 * count**power})
            rows.append(labels | {"metric": "peak_memory_mib", "value": math.nan})
    fitted = tokens.exponents(rows)
    assert [(row["attention"], row["metric"], row["n"]) for row in fitted] == [
        ("softmax", "time_exponent", 4),
        ("laplacian", "time_exponent", 4),
    ]
    assert [row["value"] for row in fitted] == pytest.approx([2.0, 1.0])
    assert [row["spread"] for row in fitted] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert all((row["from_tokens"], row["to_tokens"]) == (1024, 16384) for row in fitted)
    assert [row["control"] for row in fitted] == ["quadratic by construction", "none"]
    assert not tokens.exponents([row for row in rows if row["tokens"] < 2304])
