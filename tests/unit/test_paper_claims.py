"""The ledger holds every claim once, and its verdicts follow the rules and nothing else."""

import math
import re
from html.parser import HTMLParser

import pandas as pd
import pytest

from attngeo.files import read_json, write_json
from attngeo.paper import claims, records
from attngeo.paper.claims import VerdictName, evaluate
from attngeo.paper.decisions import DECISIONS, Lacking, Outcome
from tests.unit import paper_results

LETTERS = {"P1": "abcd", "P2": "abcdef", "P3": "abcdef", "P4": "abcde"}
EXPECTED_IDS = [f"{paper}.{letter}" for paper, letters in LETTERS.items() for letter in letters]


def verdict(claim_id, preset, folder):
    """The verdict on one claim."""
    (found,) = [v for v in evaluate(preset, folder) if v.claim.id == claim_id]
    return found


def frame(*rows):
    """Records from rows that share unit and origin."""
    filled = [{"unit": "1", "n": 5, "spread": math.nan, "spread_kind": "", "origin": "ours"} | row for row in rows]
    return pd.DataFrame(filled)


def test_every_claim_is_in_the_ledger_exactly_once():
    assert [claim.id for claim in claims.claims()] == EXPECTED_IDS


def test_every_claim_has_its_own_rule_and_every_rule_its_claim():
    names = [claim.decide for claim in claims.claims()]
    assert len(set(names)) == len(names)
    assert set(names) == set(DECISIONS)


@pytest.mark.parametrize("claim", claims.claims(), ids=lambda claim: claim.id)
def test_every_claim_is_written_out(claim):
    for text in (claim.statement, claim.test, claim.rule, *claim.deviations):
        assert text[0].isupper()
        assert text.endswith((".", "?"))
    assert claim.evidence
    assert DECISIONS[claim.decide].__doc__.startswith(f"{claim.id}:")


def test_nothing_measured_leaves_everything_untested_with_a_reason(tmp_path):
    verdicts = evaluate("study", tmp_path)
    assert {v.verdict for v in verdicts} == {VerdictName.UNTESTED}
    assert all(v.reason.startswith("not run in preset study: needs ") for v in verdicts)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("study", "confirmed"),
        ("demo", "indicated"),
        ("mine", "indicated"),
        ("imagenet", "indicated"),
        ("smoke", "untested"),
    ],
)
def test_only_the_study_confirms_what_is_no_identity(tmp_path, preset, expected):
    paper_results.write_variational(tmp_path)
    assert verdict("P1.b", preset, tmp_path).verdict == expected


@pytest.mark.parametrize("preset", ["smoke", "demo", "study"])
def test_any_preset_confirms_an_exact_identity(tmp_path, preset):
    for model in ("a", "bb"):
        paper_results.write_connection_walk(tmp_path, model)
    for claim in ("P3.a", "P3.b", "P3.c"):
        assert verdict(claim, preset, tmp_path).verdict == "confirmed"


def test_identity_on_a_single_model_is_underpowered(tmp_path):
    paper_results.write_connection_walk(tmp_path, "a")
    found = verdict("P3.a", "study", tmp_path)
    assert found.verdict == "untested"
    assert "underpowered" in found.reason


def test_rule_met_in_reverse_refutes(tmp_path):
    paper_results.write_variational(tmp_path, orders=(0.0, 0.0))
    for model in ("a", "bb"):
        paper_results.write_connection_walk(tmp_path, model, excess=-0.01, trend=0.9)
    assert verdict("P3.e", "demo", tmp_path).verdict == "refuted"
    assert verdict("P3.d", "demo", tmp_path).verdict == "refuted"
    assert verdict("P3.e", "smoke", tmp_path).verdict == "untested"


def test_mixed_evidence_is_partly(tmp_path):
    paper_results.write_variational(tmp_path, shift_slope=0.7)
    paper_results.write_connection_walk(tmp_path, "a", excess=0.01)
    paper_results.write_connection_walk(tmp_path, "bb", excess=-0.01)
    found = verdict("P1.c", "study", tmp_path)
    assert found.verdict == "partly"
    assert "not met: shift of the minimiser" in found.reason
    assert verdict("P3.e", "study", tmp_path).verdict == "partly"


def test_missing_part_of_a_rule_leaves_it_untested_and_says_what_holds(tmp_path):
    paper_results.write_variational(tmp_path)
    found = verdict("P1.a", "study", tmp_path)
    assert found.verdict == "untested"
    assert "2e-16" in found.reason
    assert "have not been measured" in found.reason


@pytest.mark.parametrize(
    ("seeds", "lead", "expected"),
    [(3, 0.5, "untested"), (5, 0.5, "confirmed"), (5, -0.4, "confirmed"), (5, -2.0, "refuted")],
)
def test_accuracy_needs_five_seeds_and_half_a_point(tmp_path, seeds, lead, expected):
    paper_results.write_runs(tmp_path, seeds=seeds, laplacian_lead=lead)
    found = verdict("P2.f", "study", tmp_path)
    assert found.verdict == expected
    assert found.numbers["Laplacian minus softmax (points), invented-a micro"] == pytest.approx(lead)
    if seeds < 5:
        assert "3 seeds of at least 5" in found.reason
    assert len(found.evidence) == 2 * 4 * seeds


def test_accuracy_is_not_compared_at_unmatched_parameters(tmp_path):
    for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=5):
        if path.name == "final.json" and "laplacian" in path.parent.name:
            write_json(path, read_json(path) | {"parameters": 400_000})
    assert "not matched" in verdict("P2.f", "study", tmp_path).reason


def test_runs_of_other_tables_do_not_count_for_accuracy(tmp_path):
    for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=5):
        if path.name == "final.json" and "laplacian" in path.parent.name:
            write_json(path, read_json(path) | {"feeds": ["tab2"]})
    assert verdict("P2.f", "study", tmp_path).verdict == "untested"


def test_value_that_is_not_finite_leaves_its_claim_untested(tmp_path):
    paper_results.write_runs(tmp_path, seeds=5, nan_run=True)
    found = verdict("P2.f", "study", tmp_path)
    assert found.verdict == "untested"
    assert "2 of 40 values of top1 are not finite" in found.reason


def test_injectivity_needs_collisions_to_compare_with(tmp_path):
    paper_results.write_injectivity(tmp_path)
    assert verdict("P2.c", "study", tmp_path).verdict == "confirmed"
    paper_results.write_injectivity(tmp_path, recall=0.2)
    assert verdict("P2.c", "study", tmp_path).verdict == "partly"
    paper_results.write_injectivity(tmp_path, collisions=0.0)
    assert "no collisions" in verdict("P2.c", "study", tmp_path).reason


def test_trend_of_shallow_models_says_nothing(tmp_path):
    for model in ("a", "bb"):
        paper_results.write_connection_walk(tmp_path, model, layers=3)
    found = verdict("P3.d", "study", tmp_path)
    assert found.verdict == "untested"
    assert "0 of at least 2 models" in found.reason


def test_files_outside_the_inputs_are_no_evidence(tmp_path):
    for model in ("a", "bb"):
        paper_results.write_connection_walk(tmp_path, model)
    stale = tmp_path / "analyses" / "connection_walk" / "bb.json"
    kept = tmp_path / "analyses" / "connection_walk" / "a.json"
    found = [v for v in evaluate("study", tmp_path, [kept]) if v.claim.id == "P3.a"]
    assert found[0].evidence == ("analyses/connection_walk/a.json",)
    assert stale.exists()


def test_scale_needs_three_sizes_of_one_family():
    def model(name, family, size, excess):
        shared = {"model": name, "family": family, "precision": "float32"}
        return (
            shared | {"metric": "parameters", "control": "trained", "value": size},
            shared | {"metric": "isometry_score", "control": "excess", "value": excess},
        )

    two = [*model("a", "f", 1e6, 0.1), *model("b", "f", 2e6, 0.2), *model("c", "g", 3e6, 0.3)]
    with pytest.raises(Lacking, match="2 sizes of one family"):
        DECISIONS["scale_trend"](frame(*two))
    assert DECISIONS["scale_trend"](frame(*two, *model("d", "f", 4e6, 0.3))).outcome is Outcome.MET
    assert DECISIONS["scale_trend"](frame(*two, *model("d", "f", 4e6, 0.15))).outcome is Outcome.MIXED


@pytest.mark.parametrize(
    ("name", "met", "reverse"),
    [
        (
            "cost_exponents",
            {
                ("time", "laplacian"): 1.05,
                ("memory", "laplacian"): 1.0,
                ("time", "softmax"): 1.9,
                ("memory", "softmax"): 2.0,
            },
            {
                ("time", "laplacian"): 1.9,
                ("memory", "laplacian"): 1.9,
                ("time", "softmax"): 1.1,
                ("memory", "softmax"): 1.0,
            },
        ),
    ],
)
def test_cost_exponents(name, met, reverse):
    def measured(exponents):
        return frame(
            *(
                {"metric": f"{what}_exponent", "attention": kind, "value": value}
                for (what, kind), value in exponents.items()
            )
        )

    assert DECISIONS[name](measured(met)).outcome is Outcome.MET
    assert DECISIONS[name](measured(reverse)).outcome is Outcome.REVERSE
    with pytest.raises(Lacking):
        DECISIONS[name](measured({("time", "laplacian"): 1.0}))


def test_norm_gain_is_judged_model_by_model():
    def gains(model, values):
        return [
            {"metric": "norm_gain_cv", "control": "trained", "model": model, "layer": i, "value": v}
            for i, v in enumerate(values)
        ]

    even, uneven = gains("a", [0.1, 0.2, 0.25, 0.1, 0.9]), gains("b", [0.1, 0.3, 0.4, 0.5, 0.9])
    assert DECISIONS["norm_gain_constant"](frame(*even)).outcome is Outcome.MET
    assert DECISIONS["norm_gain_constant"](frame(*uneven)).outcome is Outcome.REVERSE
    assert DECISIONS["norm_gain_constant"](frame(*even, *uneven)).outcome is Outcome.MIXED


def test_middle_mass_needs_two_feature_sets_and_intervals():
    def mass(name, value, spread):
        labels = {"metric": "middle_tercile_mass_excess", "features": name}
        return labels | {"value": value, "spread": spread, "spread_kind": "95 % interval"}

    decide = DECISIONS["middle_distance_mass"]
    with pytest.raises(Lacking, match="1 feature sets of at least 2"):
        decide(frame(mass("a", 1.0, 0.1)))
    assert decide(frame(mass("a", 1.0, 0.1), mass("b", 1.0, 0.1))).outcome is Outcome.MET
    assert decide(frame(mass("a", 1.0, 0.1), mass("b", 1.0, 2.0))).outcome is Outcome.MIXED
    assert decide(frame(mass("a", -1.0, 0.1), mass("b", -1.0, 0.1))).outcome is Outcome.REVERSE


def test_solvers_are_compared_at_equal_products_on_both_kinds_of_matrices():
    def residual(solver, matrix, products, value):
        return {"metric": "solver_residual", "solver": solver, "matrix": matrix, "products": products, "value": value}

    ours = [residual("newton_schulz", matrix, 20, 0.1) for matrix in ("trained", "kappa_50")]
    decide = DECISIONS["solver_residuals"]
    theirs = [residual("conjugate_gradient", matrix, 20, 0.2) for matrix in ("trained", "kappa_50")]
    assert decide(frame(*ours, *theirs)).outcome is Outcome.MET
    better = [residual("conjugate_gradient", matrix, 20, 0.05) for matrix in ("trained", "kappa_50")]
    assert decide(frame(*ours, *better)).outcome is Outcome.REVERSE
    elsewhere = [residual("conjugate_gradient", matrix, 21, 0.2) for matrix in ("trained", "kappa_50")]
    with pytest.raises(Lacking, match="no number of matrix products"):
        decide(frame(*ours, *elsewhere))


def test_gpu_speed_is_judged_on_a_gpu_at_every_published_size():
    rows = [
        {
            "metric": "speedup",
            "device_kind": "cuda",
            "operation": operation,
            "direction": direction,
            "tokens": n,
            "value": 3.0,
        }
        for operation in ("laplacian_kernel", "newton_schulz")
        for direction in ("forward", "backward")
        for n in (16, 32, 64, 128)
    ]
    decide = DECISIONS["gpu_speedup"]
    assert decide(frame(*rows)).outcome is Outcome.MET
    assert decide(frame(*rows[1:], rows[0] | {"value": 0.5})).outcome is Outcome.MIXED
    with pytest.raises(Lacking):
        decide(frame(*rows[1:]))
    with pytest.raises(Lacking):
        decide(frame(*(row | {"device_kind": "cpu"} for row in rows)))


def test_fiber_bundle_rules():
    rank = {"metric": "score_rank", "form": "query", "dimension": 3, "tokens": 64, "value": 10.0, "predicted": 10}
    assert DECISIONS["score_rank"](frame(rank)).outcome is Outcome.MET
    assert (
        DECISIONS["score_rank"](frame(rank, rank | {"tokens": 7, "value": 6.0, "predicted": 7})).outcome
        is Outcome.MIXED
    )
    cost = (
        {"metric": "inversion_exponent_d", "value": 1.1},
        {"metric": "inversion_exponent_r", "value": 1.8},
        {"metric": "block_overhead", "value": 0.05, "dimension": 1024, "rank": 8},
    )
    assert DECISIONS["metric_cost"](frame(*cost)).outcome is Outcome.MET
    with pytest.raises(Lacking, match="1,024"):
        DECISIONS["metric_cost"](frame(*cost[:2], cost[2] | {"dimension": 512}))
    trained = ({"metric": "training_finished", "value": 1.0, "seed": 0}, {"metric": "gradient_error", "value": 1e-6})
    assert DECISIONS["fiber_bundle_trains"](frame(*trained)).outcome is Outcome.MET
    predicted = {"metric": "prediction_met", "prediction": "a", "value": 1.0}
    assert (
        DECISIONS["predictions"](frame(predicted, predicted | {"prediction": "b", "value": 0.0})).outcome
        is Outcome.MIXED
    )


@pytest.mark.parametrize(("factor", "outcome"), [(20.0, Outcome.MET), (2.0, Outcome.REVERSE)])
def test_rank_collapse_needs_ten_times_in_four_of_five_seeds(factor, outcome):
    def rows(seeds):
        return [
            {"metric": "last_layer_relative_residual", "form": form, "seed": seed, "phase": phase, "value": value}
            for seed in range(seeds)
            for phase in ("init", "trained")
            for form, value in (("euclidean", 1.0), ("constant", 0.5), ("heterogeneous", factor if seed else 1.0))
        ]

    assert DECISIONS["rank_collapse"](frame(*rows(5))).outcome is outcome
    with pytest.raises(Lacking, match="4 seeds of at least 5"):
        DECISIONS["rank_collapse"](frame(*rows(4)))


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_shows_every_claim(tmp_path):
    paper_results.write_variational(tmp_path)
    claims.write_page("demo", tmp_path, tmp_path / "claims.html")
    text = (tmp_path / "claims.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("details") == len(EXPECTED_IDS)
    assert not {"link", "img", "iframe", "base", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "srcset", "action") or a[1].startswith("on")]
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttpRequest", text)
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    for claim in claims.claims():
        assert claim.statement in page.text


def test_page_escapes_what_results_say(tmp_path):
    hostile = '<script>alert("x")</script>'
    for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=3):
        if path.name == "final.json":
            write_json(path, read_json(path) | {"dataset": hostile})
    text = claims.page(evaluate("demo", tmp_path))
    assert hostile not in text
    assert "&lt;script&gt;" in text
    assert Page(text).tags.count("script") == 1


def test_evidence_of_runs_and_records_becomes_one_frame(tmp_path):
    runs = [path for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=1) if path.name == "final.json"]
    path = tmp_path / "analyses" / "variational.json"
    records.write(path, [records.Record(metric="m", value=1.0, n=1)])
    found = claims.read_evidence([*runs, path])
    assert set(found["metric"]) == {"m", "top1", "parameters"}
