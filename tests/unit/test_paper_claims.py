"""The ledger holds every claim once, and its verdicts follow the rules and nothing else."""

import math
from pathlib import Path

import pandas as pd
import pytest
import yaml
from pydantic import ValidationError

from attngeo.evaluation.token_sizes import FITTED_FROM, FITTED_TO, TOKENS
from attngeo.files import read_json, write_json
from attngeo.paper import claims, records
from attngeo.paper.claims import POWERED_PRESETS, Claim, Minimum, VerdictName, evaluate, judge
from attngeo.paper.decisions import DECISIONS, Finding, Lacking, Outcome
from tests.unit import paper_results

ROOT = Path(__file__).parents[2]
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
    for text in (claim.statement, claim.test, claim.rule, claim.refuted, *claim.deviations):
        assert text[0].isupper()
        assert text.endswith((".", "?"))
    assert claim.evidence
    assert DECISIONS[claim.decide].__doc__.startswith(f"{claim.id}:")
    assert "Against: " in DECISIONS[claim.decide].__doc__


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
        ("imagenet", "confirmed"),
        ("smoke", "untested"),
    ],
)
def test_only_powered_presets_confirm_what_is_no_identity(tmp_path, preset, expected):
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


@pytest.mark.parametrize(
    ("preset", "outcome", "verdict_name", "start"),
    [
        ("study", Outcome.MET, "confirmed", "so it is"),
        ("study", Outcome.MIXED, "partly", "so it is"),
        ("study", Outcome.REVERSE, "refuted", "so it is"),
        ("study", Outcome.NOT_MET, "undecided", "the rule is neither met nor contradicted: so it is"),
        ("imagenet", Outcome.REVERSE, "refuted", "so it is"),
        ("demo", Outcome.MET, "indicated", "so it is; preset demo indicates"),
        ("demo", Outcome.MIXED, "undecided", "only some parts hold: so it is"),
        (
            "demo",
            Outcome.REVERSE,
            "indicated against",
            "so it is; preset demo indicates, only study and imagenet refute",
        ),
        ("demo", Outcome.NOT_MET, "undecided", "the rule is neither met nor contradicted: so it is"),
        ("mine", Outcome.REVERSE, "indicated against", "so it is; preset mine indicates"),
        *(("smoke", outcome, "untested", "preset smoke is too small for a verdict") for outcome in Outcome),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_verdict_is_capped_by_the_power_of_the_preset(
    tmp_path, monkeypatch, preset, outcome, verdict_name, start, exact
):
    monkeypatch.setitem(DECISIONS, "invented", lambda frame: Finding(outcome, "so it is"))
    texts = dict.fromkeys(("id", "paper", "statement", "test", "rule", "refuted"), "Invented.")
    claim = Claim(**texts, decide="invented", evidence=("*",), deviations=(), exact=exact)
    path = paper_results.write_injectivity(tmp_path)
    found = judge(claim, preset, tmp_path, [path])
    if exact:
        of_study = {"met": "confirmed", "mixed": "partly", "reverse": "refuted", "not met": "undecided"}
        assert found.verdict == of_study[outcome]
    else:
        assert found.verdict == verdict_name
        assert found.reason.startswith(start)


@pytest.mark.parametrize(
    ("outcome", "verdict_name", "start"),
    [
        (Outcome.MET, "indicated", "so it is; 32 images of at least 33; "),
        (Outcome.REVERSE, "indicated against", "so it is; 32 images of at least 33; "),
        (Outcome.MIXED, "untested", "underpowered, 32 images of at least 33; so far only some parts hold: so it is"),
        (Outcome.NOT_MET, "untested", "underpowered, 32 images of at least 33; so far the rule is neither met nor"),
    ],
)
@pytest.mark.parametrize(("preset", "end"), [("study", "that is too little to "), ("demo", "preset demo indicates")])
def test_below_its_minimum_a_claim_is_indicated_or_untested(
    tmp_path, monkeypatch, preset, end, outcome, verdict_name, start
):
    monkeypatch.setitem(DECISIONS, "invented", lambda frame: Finding(outcome, "so it is"))
    texts = dict.fromkeys(("id", "paper", "statement", "test", "rule", "refuted"), "Invented.")
    minimum = Minimum(what="images", at_least=33, metric="collisions")
    claim = Claim(**texts, decide="invented", evidence=("*",), deviations=(), minimums=(minimum, minimum))
    found = judge(claim, preset, tmp_path, [paper_results.write_injectivity(tmp_path)])
    assert found.verdict == verdict_name
    assert found.reason.startswith(start)
    assert (end in found.reason) == verdict_name.startswith("indicated")


def test_every_verdict_has_a_meaning_of_one_line():
    meanings = [name.meaning for name in VerdictName]
    assert len(set(meanings)) == len(VerdictName)
    assert not any("\n" in meaning or meaning.endswith(".") for meaning in meanings)


@pytest.mark.parametrize(
    ("claim_id", "write", "enough", "few", "words"),
    [
        ("P1.b", paper_results.write_variational, {}, {"seeds": 4}, "4 seeds of at least 5"),
        ("P1.c", paper_results.write_variational, {}, {"seeds": 2}, "2 seeds of at least 5"),
        ("P2.a", paper_results.write_tokens, {}, {"largest_plain": 4096}, "4 sizes a fit of at least 5"),
        ("P2.b", paper_results.write_attention_distance, {}, {"images": 8}, "8 images of at least 16"),
        ("P2.c", paper_results.write_injectivity, {}, {"images": 8}, "8 images of at least 16"),
        ("P2.f", paper_results.write_runs, {"seeds": 5}, {"seeds": 5, "n_eval": 100}, "100 evaluated images a run"),
    ],
)
def test_name_of_the_preset_is_not_enough_to_confirm(tmp_path, claim_id, write, enough, few, words):
    write(tmp_path / "study", **enough)
    write(tmp_path / "shrunk", **few)
    assert verdict(claim_id, "study", tmp_path / "study").verdict == "confirmed"
    found = verdict(claim_id, "study", tmp_path / "shrunk")
    assert found.verdict == "indicated"
    assert words in found.reason


@pytest.mark.parametrize(
    ("claim_id", "few", "words"),
    [
        ("P3.d", {"windows": 8}, "8 windows of at least 16"),
        ("P3.d", {"window_tokens": 32}, "32 tokens a window of at least 128"),
        ("P3.e", {"null_draws": 16}, "16 null draws of at least 32"),
    ],
)
def test_a_single_small_analysis_takes_the_power_away(tmp_path, claim_id, few, words):
    for preset, settings in (("study", {}), ("shrunk", few)):
        paper_results.write_connection_walk(tmp_path / preset, "a")
        paper_results.write_connection_walk(tmp_path / preset, "bb", **settings)
    assert verdict(claim_id, "study", tmp_path / "study").verdict == "confirmed"
    found = verdict(claim_id, "study", tmp_path / "shrunk")
    assert found.verdict == "indicated"
    assert words in found.reason


def test_small_analysis_of_a_powered_preset_refutes_nothing(tmp_path):
    for name, seeds in (("study", 10), ("shrunk", 2)):
        paper_results.write_variational(tmp_path / name, orders=(0.0, 0.0), seeds=seeds)
    assert verdict("P1.b", "study", tmp_path / "study").verdict == "refuted"
    found = verdict("P1.b", "study", tmp_path / "shrunk")
    assert found.verdict == "indicated against"
    assert found.reason.endswith("; 2 seeds of at least 5; that is too little to refute")


@pytest.mark.parametrize("preset", POWERED_PRESETS)
def test_powered_presets_ask_for_what_the_rules_need(preset):
    settings = yaml.safe_load((ROOT / "config" / preset / "config.yaml").read_text(encoding="utf-8"))
    asked = {
        "seeds": len(settings["variational"]["seeds"]),
        "images": min(settings[key]["images"] for key in ("injectivity", "connection_walk", "attention_distance")),
        "windows": min(
            settings["connection_walk"]["windows"],
            *(settings["trajectories"][key] for key in ("windows", "images")),  # an image is a vision model's window
        ),
        "tokens a window": settings["connection_walk"]["window_tokens"],
        "null draws": settings["connection_walk"]["null_draws"],
        "sizes a fit": sum(
            FITTED_FROM <= n <= FITTED_TO for n in settings["benchmarks"]["tokens"].get("tokens", TOKENS)
        ),
        "matrices": settings["benchmarks"]["solver"]["matrices"] * len(settings["benchmarks"]["solver"]["seeds"]),
    }
    for claim in claims.claims():
        for minimum in claim.minimums:
            assert asked.get(minimum.what, minimum.at_least) >= minimum.at_least, (claim.id, minimum)


def test_minimum_counts_one_thing_and_identities_have_none():
    with pytest.raises(ValidationError, match="either metric or setting"):
        Minimum(what="windows", at_least=3)
    (claim,) = [claim for claim in claims.claims() if claim.id == "P1.b"]
    with pytest.raises(ValidationError, match="no number of seeds"):
        Claim(**claim.model_dump() | {"exact": True})


def test_minimum_over_a_label_counts_its_values():
    minimum = Minimum(what="seeds", at_least=2, metric="training_finished", distinct="seed")
    one = frame({"metric": "training_finished", "value": 1.0, "seed": 0})
    assert minimum.shortfall(one) == "1 seeds of at least 2"
    assert minimum.shortfall(frame({"metric": "other", "value": 1.0})) == "0 seeds of at least 2"
    assert not minimum.shortfall(pd.concat([one, one.assign(seed=1)]))


def test_partly_needs_a_part_that_holds(tmp_path):
    paper_results.write_variational(tmp_path, shift_slope=0.7)
    found = verdict("P1.c", "study", tmp_path)
    assert found.verdict == "partly"
    assert "contradicted: shift of the minimiser" in found.reason


@pytest.mark.parametrize(
    ("slopes", "standard_error", "outcome"),
    [
        ((2.0, 1.0, 1.0, 4.0), 0.001, Outcome.MET),
        ((2.09, 1.04, 0.96, 3.7), 0.001, Outcome.MET),
        ((2.2, 1.2, 1.2, 3.5), 0.1, Outcome.NOT_MET),  # outside the tolerance, by less than 5 standard errors
        ((1.0, 2.0, 0.0, 0.0), 0.001, Outcome.REVERSE),
        ((1.0, 1.0, 0.0, 0.0), 0.001, Outcome.MIXED),
        ((2.0, 1.0, 1.0, 0.0), 0.001, Outcome.MIXED),  # the claim names the Euler-Lagrange equation
        ((1.0, 1.2, 1.2, 3.5), 0.01, Outcome.REVERSE),
        ((3.0, 1.2, 1.2, 3.5), 0.1, Outcome.NOT_MET),
    ],
)
def test_missed_slope_contradicts_only_when_it_is_clear(tmp_path, slopes, standard_error, outcome):
    path = paper_results.write_variational(
        tmp_path,
        variation_slopes=slopes[:2],
        shift_slope=slopes[2],
        euler_lagrange=slopes[3],
        standard_error=standard_error,
    )
    assert DECISIONS["variation_slopes"](records.read(path)).outcome is outcome


@pytest.mark.parametrize("claim_id", ["P1.b", "P1.c"])
def test_softmax_normalised_attention_is_a_part_of_the_claim(tmp_path, claim_id):
    path = paper_results.write_variational(tmp_path, softmax_obeys=False)
    found = verdict(claim_id, "study", tmp_path)
    assert found.verdict == "partly"
    assert found.reason.startswith(
        "holds for unnormalised attention with query, key and value maps equal to the identity; softmax-normalised "
        "attention violates it; "
    )
    assert found.reason.endswith("contradicted: softmax-normalised attention")
    paper_results.write_variational(tmp_path)
    assert "softmax-normalised attention obeys it too" in verdict(claim_id, "study", tmp_path).reason
    paper_results.write_variational(tmp_path, orders=(0.0, 0.0), variation_slopes=(1.0, 2.0), euler_lagrange=0.0)
    assert verdict(claim_id, "study", tmp_path).verdict == ("refuted" if claim_id == "P1.b" else "partly")
    measured = records.read(path)
    decide = DECISIONS["energy_dissipation_balance" if claim_id == "P1.b" else "variation_slopes"]
    with pytest.raises(Lacking, match="softmax-normalised attention has not been measured"):
        decide(measured[measured["control"] != "softmax_normalised"])


def test_slope_without_a_standard_error_is_no_failure(tmp_path):
    path = paper_results.write_variational(tmp_path, shift_slope=0.7, orders=(0.2, 4.0), standard_error=math.nan)
    with pytest.raises(Lacking, match="slope of the shift of the minimiser has no standard error"):
        DECISIONS["variation_slopes"](records.read(path))
    with pytest.raises(Lacking, match="has no standard error"):
        DECISIONS["energy_dissipation_balance"](records.read(path))


@pytest.mark.parametrize(
    ("orders", "outcome"),
    [
        ((1.0, 4.0), Outcome.MET),
        ((1.5, 4.0), Outcome.MIXED),
        ((1.5, 3.0), Outcome.NOT_MET),
        ((0.0, 0.1), Outcome.REVERSE),
        ((0.0, 3.0), Outcome.NOT_MET),
    ],
)
def test_energy_balance_is_reversed_only_where_it_does_not_fall(tmp_path, orders, outcome):
    measured = records.read(paper_results.write_variational(tmp_path, orders=orders))
    assert DECISIONS["energy_dissipation_balance"](measured).outcome is outcome
    falls_too = measured["control"].eq("one_over_n") & measured["metric"].eq("slope")
    measured.loc[falls_too, "value"] = 1.0
    with_falling_control = DECISIONS["energy_dissipation_balance"](measured)
    assert with_falling_control.outcome is (Outcome.MIXED if outcome is Outcome.MET else outcome)
    assert "falls on controls too" in with_falling_control.reason
    with pytest.raises(Lacking, match="without controls"):
        DECISIONS["energy_dissipation_balance"](measured[measured["control"] == "none"])


def layers(model, *excesses, half=0.01):
    """Isometry excess of whole layers with a 95 % interval."""
    shared = {"metric": "isometry_score", "control": "excess", "model": model, "head": -1}
    interval = {"spread": half, "spread_kind": "95 % interval"}
    return [shared | interval | {"layer": index, "value": value} for index, value in enumerate(excesses)]


@pytest.mark.parametrize(
    ("models", "outcome", "words"),
    [
        ([(1, 1, -1), (1, 1, 0), (-1, -1, -1)], Outcome.MET, "above the null: 2 of 3, below it: 1, neither: 0"),
        ([(1, 1, -1), (-1, -1, -1)], Outcome.MIXED, "above the null: 1 of 2, below it: 1, neither: 0; 4 of 6 layers"),
        ([(1, 0, 0), (-1, 1, -1, 1)], Outcome.NOT_MET, "above the null: 0 of 2, below it: 0, neither: 2; 2 of 7"),
        ([(0, 0), (-1, -1, -1, -1)], Outcome.REVERSE, "above the null: 0 of 2, below it: 1, neither: 1; 4 of 6"),
        ([(-1, -1)], Outcome.REVERSE, "above the null: 0 of 1"),
        # A deep model just short of a majority below outweighs a shallow one that has it.
        ([(-1, -1), (-1, -1, 0, 0, 0, 0)], Outcome.NOT_MET, "below it: 1, neither: 1; 4 of 8 layers"),
    ],
)
def test_isometry_is_judged_by_models_and_reversed_by_layers(models, outcome, words):
    measured = frame(*(row for index, excesses in enumerate(models) for row in layers(f"m{index}", *excesses)))
    found = DECISIONS["isometry_excess"](measured)
    assert found.outcome is outcome
    assert words in found.reason


def test_isometry_without_an_interval_is_no_failure(tmp_path):
    measured = frame(*layers("a", 1, 1), *layers("b", 1, 1, half=math.nan))
    with pytest.raises(Lacking, match="2 of 2 layers of b have no 95 % interval"):
        DECISIONS["isometry_excess"](measured)
    paper_results.write_connection_walk(tmp_path, "one-head", heads=1)
    found = verdict("P3.e", "study", tmp_path)
    assert found.verdict == "untested"
    assert "layers of one-head have no 95 % interval" in found.reason


def test_demo_never_says_partly_or_refuted(tmp_path):
    paper_results.write_variational(tmp_path, orders=(0.0, 0.0), shift_slope=0.5)
    paper_results.write_score_rank(tmp_path)
    paper_results.write_injectivity(tmp_path, recall=0.1)
    paper_results.write_runs(tmp_path, seeds=5, laplacian_lead=-2.0)
    for model in ("a", "bb"):
        paper_results.write_connection_walk(tmp_path, model, excess=-0.01, trend=0.9)
    verdicts = evaluate("demo", tmp_path)
    by_id = {v.claim.id: v.verdict for v in verdicts}
    assert not {VerdictName.PARTLY, VerdictName.REFUTED} & set(by_id.values())
    assert all(v.claim.exact for v in verdicts if v.verdict is VerdictName.CONFIRMED)
    assert by_id["P1.c"] == by_id["P2.c"] == "undecided"
    assert by_id["P4.a"] == "indicated", "a numerical rank of drawn matrices is no identity"
    other_way = {claim for claim, name in by_id.items() if name == "indicated against"}
    assert other_way == {"P1.b", "P2.f", "P3.d", "P3.e"}
    study = {v.claim.id for v in evaluate("study", tmp_path) if v.verdict is VerdictName.REFUTED}
    assert study == other_way


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
    assert found.numbers["Laplacian minus softmax (points), invented-a micro invented"] == pytest.approx(lead)
    if seeds < 5:
        assert "3 seeds of at least 5" in found.reason
    assert len(found.evidence) == 2 * 4 * seeds


@pytest.mark.parametrize(
    ("lead", "expected"), [(2.0, "confirmed"), (0.0, "undecided"), (-1.0, "undecided"), (-3.0, "refuted")]
)
def test_accuracy_is_confirmed_and_refuted_by_its_whole_interval(tmp_path, lead, expected):
    for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=5, laplacian_lead=lead):
        run = path.parent.name
        if path.name == "final.json" and "laplacian" in run:  # by seed one point up and down: an interval of +- 1.24
            final = read_json(path)
            write_json(path, final | {"accuracy": final["accuracy"] + (-1.0, 1.0, 0.0, 1.0, -1.0)[final["seed"]]})
    found = verdict("P2.f", "study", tmp_path)
    assert found.verdict == expected
    assert f"d micro invented {lead:+.2f} (± 1.24) points" in found.reason


def test_accuracy_is_not_compared_at_unmatched_parameters(tmp_path):
    for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=5):
        if path.name == "final.json" and "laplacian" in path.parent.name:
            write_json(path, read_json(path) | {"parameters": 400_000})
    found = verdict("P2.f", "study", tmp_path)
    assert found.verdict == "untested"
    assert "d micro invented (parameters are not matched, ratio 1.176)" in found.reason


def test_runs_of_two_recipes_are_two_comparisons(tmp_path):
    for recipe, lead in (("short", 0.5), ("long", -2.0)):
        paper_results.write_runs(tmp_path, datasets=["d"], seeds=5, recipe=recipe, laplacian_lead=lead)
    found = verdict("P2.f", "study", tmp_path)
    assert found.verdict == "partly"
    assert found.numbers["seeds, d micro short"] == found.numbers["seeds, d micro long"] == 5


def test_comparison_of_few_seeds_is_named_and_does_not_count(tmp_path):
    paper_results.write_runs(tmp_path, datasets=["d"], seeds=5, laplacian_lead=0.5)
    paper_results.write_runs(tmp_path, datasets=["few"], seeds=2, laplacian_lead=-9.0)
    found = verdict("P2.f", "study", tmp_path)
    assert found.verdict == "confirmed"
    assert "not counted: few micro invented (2 seeds of at least 5, so far -9.00 points)" in found.reason


def test_two_runs_of_one_seed_are_not_paired(tmp_path):
    for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=5):
        if path.name == "final.json" and "laplacian" in path.parent.name:
            write_json(path, read_json(path) | {"seed": 0})
    assert "share a seed" in verdict("P2.f", "study", tmp_path).reason


def test_value_that_is_not_finite_leaves_its_claim_untested(tmp_path):
    for path in paper_results.write_runs(tmp_path, seeds=5, nan_run=True):
        if path.name == "final.json" and "invented-b-laplacian" in path.parent.name and path.parent.name.endswith("s1"):
            write_json(path, read_json(path) | {"accuracy": math.nan})
    found = verdict("P2.f", "study", tmp_path)
    assert found.verdict == "untested"
    assert "1 of 10 values of top1 are not finite" in found.reason


def test_run_of_a_kind_that_is_not_compared_may_diverge(tmp_path):
    paper_results.write_runs(tmp_path, seeds=5, nan_run=True, laplacian_lead=0.5)
    assert verdict("P2.f", "study", tmp_path).verdict == "confirmed"


def test_identity_on_models_of_one_family_is_underpowered_and_names_it(tmp_path):
    for model in ("a", "bb"):
        paper_results.write_connection_walk(tmp_path, model, family="bert")
    for claim in ("P3.a", "P3.b"):
        found = verdict(claim, "study", tmp_path)
        assert found.verdict == "untested"
        assert "at least 2 families" in found.reason
        assert "2 models of 1 family (bert)" in found.reason
    paper_results.write_connection_walk(tmp_path, "ccc", family="llama")
    assert "3 models of 2 families (bert, llama)" in verdict("P3.a", "study", tmp_path).reason


def identity(model, family, error):
    """The identity error of one head and of one layer."""
    shared = {"metric": "identity_error", "model": model, "family": family, "value": error}
    return [shared | {"head": 0, "control": "trained"}, shared | {"head": -1, "control": "float64_softmax"}]


@pytest.mark.parametrize("rule", ["single_head_identity", "multi_head_identity"])
def test_identity_holds_on_every_family_or_not_at_all(rule):
    decide = DECISIONS[rule]
    assert decide(frame(*identity("a", "f", 1e-15), *identity("b", "g", 1e-9))).outcome is Outcome.MET
    mixed = decide(frame(*identity("a", "f", 1e-15), *identity("b", "g", 0.5)))
    assert mixed.outcome is Outcome.MIXED
    assert "contradicted: b" in mixed.reason
    assert decide(frame(*identity("a", "f", 1e-6), *identity("b", "g", 1e-6))).outcome is Outcome.NOT_MET
    assert decide(frame(*identity("a", "f", 0.1), *identity("b", "g", 0.1))).outcome is Outcome.REVERSE


@pytest.mark.parametrize("rule", ["single_head_identity", "multi_head_identity", "scale_trend"])
def test_records_without_a_family_are_lacking(rule):
    named = frame(*identity("a", "f", 1e-15), *identity("b", "g", 1e-15), *layers("a", 1), *layers("b", 1))
    with pytest.raises(Lacking, match="the records of a, b name no model family"):
        DECISIONS[rule](named.drop(columns="family"))
    with pytest.raises(Lacking, match="the records of b name no model family"):
        DECISIONS[rule](named.assign(family=named["model"].map({"a": "f"})))


@pytest.mark.parametrize(
    ("excess", "outcome"),
    [
        ((0.02, 0.01, 0.001), Outcome.MET),  # the last one's interval holds 0
        ((0.02, 0.001), Outcome.MIXED),
        ((0.02, 0.02, -0.02), Outcome.MIXED),
        ((0.001, -0.001), Outcome.NOT_MET),
        ((-0.02, -0.02, 0.001), Outcome.REVERSE),
    ],
)
def test_middle_mass_counts_feature_sets_and_tells_of_its_controls(tmp_path, excess, outcome):
    path = paper_results.write_attention_distance(tmp_path, excess=excess)
    found = DECISIONS["middle_distance_mass"](records.read(path))
    assert found.outcome is outcome
    above, below = sum(value > 0.005 for value in excess), sum(value < -0.005 for value in excess)
    assert f"on Gaussian noise of the same covariance above in {above}, below in {below}" in found.reason
    assert found.numbers["feature sets above and below 0 at mean similarity 0.8"] == (
        f"{above} and {below} of {len(excess)}"
    )


@pytest.mark.parametrize(
    ("excess", "outcome", "words"),
    [
        ((0.02, 0.01, 0.001), Outcome.MIXED, "at which the kernels are matched (at 0.8 above in 0, below in 2)"),
        ((0.02, 0.01, 0.001, 0.001), Outcome.MET, "above 0 in 2 of 4"),  # turned in half of the sets: not in most
        ((-0.02, -0.02, 0.001), Outcome.MIXED, "at which the kernels are matched (at 0.8 above in 2, below in 0)"),
        ((0.02, 0.02, -0.02), Outcome.MIXED, "contradicted: invented set 2"),
        ((0.001, -0.001), Outcome.NOT_MET, "above 0 in 0 of 2"),
    ],
)
def test_a_sign_that_another_mean_similarity_turns_is_mixed(tmp_path, excess, outcome, words):
    measured = records.read(paper_results.write_attention_distance(tmp_path, excess=excess, reversed_at=0.8))
    found = DECISIONS["middle_distance_mass"](measured)
    assert found.outcome is outcome
    assert words in found.reason
    turns = outcome is Outcome.MIXED and abs(excess[-1]) < 0.005
    assert ("the sign depends on the mean similarity" in found.reason) == turns
    # Below 0 is what lies below by both partitions into terciles.
    measured.loc[measured["partition"].eq("l1") & measured["matched_at"].eq(0.8), "value"] = 0.0
    assert "sign depends" not in DECISIONS["middle_distance_mass"](measured).reason


def test_middle_mass_without_a_number_or_a_second_set_is_no_failure(tmp_path):
    path = paper_results.write_attention_distance(tmp_path, excess=(0.02,))
    with pytest.raises(Lacking, match="1 feature sets of at least 2"):
        DECISIONS["middle_distance_mass"](records.read(path))
    path = paper_results.write_attention_distance(tmp_path, nan=True)
    with pytest.raises(Lacking, match="not finite"):
        DECISIONS["middle_distance_mass"](records.read(path))


def test_injectivity_needs_collisions_to_compare_with(tmp_path):
    paper_results.write_injectivity(tmp_path)
    found = verdict("P2.c", "study", tmp_path)
    assert found.verdict == "confirmed"
    assert (
        "linear attention has some (1 of 3 cases: only the constructed copies); un-whitened forms have 0"
        in found.reason
    )
    assert "recall 0.800 whitened against 0.300, higher in 3 of 3 settings" in found.reason
    paper_results.write_injectivity(tmp_path, recall=0.2)
    assert verdict("P2.c", "study", tmp_path).verdict == "partly"
    paper_results.write_injectivity(tmp_path, recall=0.3, ours=1.0)
    assert verdict("P2.c", "study", tmp_path).verdict == "undecided"
    paper_results.write_injectivity(tmp_path, recall=0.2, ours=64.0)
    assert verdict("P2.c", "study", tmp_path).verdict == "refuted"
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


def sized(name, family, size, excess, trend=None, precision="float32"):
    """A model's parameters, excess and, in a model deep enough for one, the trend of its graph change with depth."""
    shared = {"model": name, "family": family, "precision": precision, "head": -1, "layer": 0}
    found = [
        shared | {"metric": "parameters", "control": "trained", "value": size},
        shared | {"metric": "isometry_score", "control": "excess", "value": excess},
    ]
    for control, value in (("trained", trend), ("depth_shuffled", 0.0)) if trend is not None else ():
        found.append(shared | {"metric": "graph_change_trend", "control": control, "value": value, "layer": -1})
    changes = shared | {"metric": "graph_change", "control": "trained", "value": 1.0}
    return [*found, *(changes | {"layer": layer} for layer in range(1, 6) if trend is not None)]


def trend_of(*models):
    """The finding on made-up models (`sized`)."""
    return DECISIONS["scale_trend"](frame(*(row for model in models for row in model)))


def test_scale_needs_three_sizes_of_one_family_and_both_phenomena():
    two = [sized("a", "f", 1e6, 0.1, -0.1), sized("b", "f", 2e6, 0.2, -0.2), sized("c", "g", 3e6, 0.3, -0.3)]
    with pytest.raises(Lacking, match="excess at 2 sizes of one family"):
        trend_of(*two)
    assert trend_of(*two, sized("d", "f", 4e6, 0.3, -0.3)).outcome is Outcome.MET
    assert trend_of(*two, sized("d", "f", 4e6, 0.3, -0.15)).outcome is Outcome.MIXED
    assert trend_of(*two, sized("d", "f", 4e6, 0.15, -0.15)).outcome is Outcome.NOT_MET
    with pytest.raises(Lacking, match=r"convergence at 2 sizes .*; excess, f float32 \+1.00 over 3 sizes"):
        trend_of(*two, sized("d", "f", 4e6, 0.3))  # too shallow for a trend with depth
    falling = [sized("a", "f", 1e6, 0.3, -0.3), sized("b", "f", 2e6, 0.2, -0.2), sized("d", "f", 4e6, 0.1, -0.1)]
    assert trend_of(*falling).outcome is Outcome.REVERSE
    rising = [sized("x", "g", 1e6, 0.1, -0.1), sized("y", "g", 2e6, 0.2, -0.2), sized("z", "g", 4e6, 0.3, -0.3)]
    found = trend_of(*falling, *rising)
    assert found.outcome is Outcome.MIXED
    assert "both strengthen with size in 1 of 2 families" in found.reason
    with pytest.raises(Lacking, match="2 sizes of one family"):
        trend_of(*two, sized("d", "f", 2e6, 0.3, -0.3))
    with pytest.raises(Lacking, match="the same at every size"):
        trend_of(*(sized(name, "f", size, 0.1, -0.1) for size, name in enumerate("abc", start=1)))
    with pytest.raises(Lacking, match="parameters of d have not been counted"):
        trend_of(*two, sized("d", "f", 4e6, 0.3)[1:])


@pytest.mark.parametrize(
    ("seeds", "outcome", "words"),
    [
        ([(0.1, 0.3), (0.2, 0.4), (0.35, 0.45)], Outcome.MET, "excess, own float32 +1.00 (by seed +1.00, +1.00)"),
        # Means 0.2, 0.3, 0.4; neither seed alone rises throughout.
        ([(0.1, 0.3), (0.4, 0.2), (0.35, 0.45)], Outcome.NOT_MET, "excess, own float32 +1.00 (by seed +0.50, +0.50)"),
        ([(0.1, 0.3), (0.2, 0.4), (0.35, 0.2)], Outcome.NOT_MET, "by seed +1.00, -0.50"),
        ([(0.3, 0.5), (0.2, 0.3), (0.1, 0.4)], Outcome.NOT_MET, "by seed -1.00, -0.50"),
        ([(0.3, 0.5), (0.2, 0.3), (0.1, 0.2)], Outcome.REVERSE, "-1.00 (by seed -1.00, -1.00) over 3 sizes"),
    ],
)
def test_scale_needs_the_mean_over_seeds_and_every_seed(seeds, outcome, words):
    models = [
        sized(f"own-{size}-s{seed}-step9", "own", 10.0**size, excess, -excess)
        for size, of_size in enumerate(seeds)
        for seed, excess in enumerate(of_size)
    ]
    found = trend_of(*models)
    assert found.outcome is outcome
    assert words in found.reason
    assert found.reason.count("chance of a perfect order (one-sided): 3 sizes 1 in 6") == 1
    assert found.numbers["sizes, excess, own float32"] == 3


def test_a_seed_without_enough_sizes_decides_nothing_and_untrained_trends_are_listed():
    def seed(number, excesses):
        named = enumerate(excesses)
        return [sized(f"own-{size}-s{number}-step9", "own", 1e6 * 10**size, x, -x) for size, x in named]

    untrained = {"metric": "graph_change_trend", "control": "random_init", "value": -0.7, "layer": -1, "head": -1}
    labels = {"model": "own-0-s0-step9", "family": "own", "precision": "float32"}
    found = trend_of(*seed(0, (0.1, 0.2, 0.3)), *seed(1, (0.15, 0.1)), [untrained | labels])
    assert found.outcome is Outcome.MET
    assert found.numbers["untrained trend, own float32, 1 M parameters"] == -0.7


def test_every_seed_of_a_size_has_to_agree(tmp_path):
    paper_results.write_connection_walk(tmp_path, "aa", excess=-0.02, trend=0.0)
    for seed, (excess, trend) in enumerate([(0.02, -0.9), (-0.02, 0.0)]):
        name = f"decoder-own-s{seed}-step9"
        paper_results.write_connection_walk(tmp_path, name, family="decoder", excess=excess, trend=trend)
    graphs, transports = verdict("P3.d", "study", tmp_path), verdict("P3.e", "study", tmp_path)
    assert graphs.verdict == "undecided"
    assert "in 0 of 2 models (pretrained among them: 0), rises in 0; that of the untrained" in graphs.reason
    assert "falls more in 0 of 3, every seed counted" in graphs.reason
    assert (
        "above the null: 0 of 2, below it: 1, neither: 1; 7 of 14 layers of all models are below" in transports.reason
    )
    for seed in (0, 1):
        name = f"decoder-own-s{seed}-step9"
        paper_results.write_connection_walk(tmp_path, name, family="decoder", excess=-0.02, trend=-0.9)
    assert "in 1 of 2 models (pretrained among them: 0)" in verdict("P3.d", "study", tmp_path).reason
    assert "below it: 2, neither: 0; 14 of 14 layers" in verdict("P3.e", "study", tmp_path).reason


def test_layers_below_the_null_are_also_counted_adjusted_and_at_the_same_gain():
    below = layers("m0", -1, -1, 0)
    same_gain = [row | {"control": "excess_same_gain"} for row in layers("m0", -1, 0, 0)]
    holm = {"metric": "isometry_score_layers_below_null", "control": "excess", "model": "m0", "value": 0.0, "n": 3}
    found = DECISIONS["isometry_excess"](frame(*below, *same_gain, holm))
    assert found.reason.endswith(
        "2 of 3 layers of all models are below it; every seed counted: 2 of 3, below a null with the same norm gain "
        "1 of 3, once adjusted for the number of layers of a model (Holm) 0 of 3"
    )


def test_quantised_models_and_earlier_steps_are_in_no_trend():
    rising = [sized(name, "f", 10.0**size, size, -size) for size, name in enumerate(["a", "b", "c"])]
    quantised = sized("q@4bit", "f", 1e9, -5.0, 0.9, precision="4bit")
    quantised_sizes = [sized(f"q{i}@4bit", "f", 10.0**i, -i, float(i), precision="4bit") for i in range(3)]
    earlier = [
        sized(f"own-{size}-s0-step{step}", f"own at step {step}", 10.0**size, -size, float(size))
        for size in range(3)
        for step in (0, 10)
    ]
    found = trend_of(*rising, quantised, *quantised_sizes, *earlier)
    assert found.outcome is Outcome.MET
    assert "in 1 of 1 families" in found.reason
    assert found.numbers["quantised, in no trend"] == "q0@4bit, q1@4bit, q2@4bit, q@4bit"


def test_seeds_and_steps_of_own_models_do_not_outvote_other_models(tmp_path):
    paper_results.write_decoders(tmp_path, sizes=1, seeds=4)
    for model in ("a", "bb"):
        paper_results.write_connection_walk(tmp_path, model, excess=-0.02)
    found = verdict("P3.e", "study", tmp_path)
    assert "above the null: 1 of 3, below it: 2" in found.reason
    found = verdict("P3.d", "study", tmp_path)
    assert "beyond its controls in 2 of 3 models (pretrained among them: 2)" in found.reason
    assert len([name for name in found.numbers if name.endswith("random init")]) == 4 + 2, "every seed is judged"
    assert "3 families" in verdict("P3.a", "study", tmp_path).reason


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
    assert DECISIONS[name](measured(dict.fromkeys(met, 1.5))).outcome is Outcome.NOT_MET
    with pytest.raises(Lacking):
        DECISIONS[name](measured({("time", "laplacian"): 1.0}))


def test_norm_gain_is_judged_model_by_model():
    def gains(model, values):
        return [
            {"metric": "norm_gain_cv", "control": "trained", "model": model, "layer": i, "value": v}
            for i, v in enumerate(values)
        ]

    even, uneven = gains("a", [0.1, 0.2, 0.25, 0.1, 0.9]), gains("b", [0.1, 0.3, 0.4, 0.5, 0.9])
    between = gains("c", [0.1, 0.2, 0.2, 0.5, 0.9])
    assert DECISIONS["norm_gain_constant"](frame(*between)).outcome is Outcome.NOT_MET
    assert DECISIONS["norm_gain_constant"](frame(*even)).outcome is Outcome.MET
    assert DECISIONS["norm_gain_constant"](frame(*uneven)).outcome is Outcome.REVERSE
    assert DECISIONS["norm_gain_constant"](frame(*even, *uneven)).outcome is Outcome.MIXED
    own = gains("decoder-6k-s0-step9", [0.1] * 5)
    found = DECISIONS["norm_gain_constant"](frame(*uneven, *own))
    assert found.outcome is Outcome.REVERSE, "gains that started at 1 a while ago are told, not judged"
    assert found.numbers["share of layers at most 0.25, decoder-6k-s0-step9 (trained here)"] == 1
    with pytest.raises(Lacking, match="pretrained models have not been measured"):
        DECISIONS["norm_gain_constant"](frame(*own))


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
    assert decide(frame(mass("a", 1.0, 2.0), mass("b", -1.0, 2.0))).outcome is Outcome.NOT_MET
    assert decide(frame(mass("a", 1.0, 0.1), mass("b", 1.0, 0.1), mass("c", 1.0, 2.0))).outcome is Outcome.MET
    assert decide(frame(mass("a", 1.0, 0.1), mass("b", 1.0, 0.1), mass("c", -1.0, 0.1))).outcome is Outcome.MIXED
    with pytest.raises(Lacking, match="mass excess on b has no 95 % interval"):
        decide(frame(mass("a", 1.0, 0.1), mass("b", 1.0, math.nan)))
    with pytest.raises(Lacking, match="several records of middle tercile mass excess for features a"):
        decide(frame(mass("a", 1.0, 0.1), mass("a", 1.0, 0.1), mass("b", 1.0, 0.1)))


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


@pytest.mark.parametrize(
    ("settings", "expected", "words"),
    [
        ({"newton_schulz": 0.2, "rounding": 0.0}, "confirmed", "ahead in 40 of 40 comparisons"),
        ({"rounding": 0.0}, "refuted", "ahead in 0 of 40 comparisons, in 0 of the 40 where either is above rounding"),
        # Equal at rounding is neither ahead nor behind.
        ({}, "undecided", "ahead in 0 of 40 comparisons, in 0 of the 20 where either is above rounding"),
        ({"newton_schulz": 0.2, "rounding": 1e-3}, "partly", "ahead in 4 of 40 comparisons, in 4 of the 4 where"),
        ({"matrices": 8, "newton_schulz": 0.2, "rounding": 0.0}, "indicated", "8 matrices of at least 16"),
        ({"trained": False}, "untested", "solver residual (matrix trained, solver newton_schulz) has not been"),
    ],
)
def test_solver_claim_rests_on_trained_and_kappa_50_matrices(tmp_path, settings, expected, words):
    paper_results.write_solver(tmp_path, **settings)
    found = verdict("P2.d", "study", tmp_path)
    assert found.verdict == expected, found.reason
    assert words in found.reason


def test_solver_claim_says_when_each_gets_there(tmp_path):
    paper_results.write_solver(tmp_path)
    numbers = verdict("P2.d", "study", tmp_path).numbers
    assert numbers["products to reach 0.01, Newton-Schulz, trained"] == 10.0  # 3 / 2^10 is the first below 0.01
    assert numbers["products to reach 0.01, conjugate gradient, trained"] == 5.0
    paper_results.write_solver(tmp_path, newton_schulz=0.99)
    numbers = verdict("P2.d", "study", tmp_path).numbers
    assert numbers["products to reach 0.01, Newton-Schulz, trained"] == "more than 40"


def test_gpu_claim_waits_for_a_gpu(tmp_path):
    paper_results.write_operator_timings(tmp_path)
    paper_results.write_gpu_timings(tmp_path)
    found = verdict("P2.e", "study", tmp_path)
    assert found.verdict == "untested"
    assert found.reason == "speedup (device_kind cuda) has not been measured"
    paper_results.write_gpu_timings(tmp_path, devices=["GPU"])
    found = verdict("P2.e", "study", tmp_path)
    assert found.verdict == "confirmed"
    assert found.evidence == ("benchmarks/gpu.json",)
    paper_results.write_gpu_timings(tmp_path, devices=["GPU"], repeats=4)
    assert "4 timings of at least 5" in verdict("P2.e", "study", tmp_path).reason
    paper_results.write_gpu_timings(tmp_path, devices=["GPU"], ratio=0.5)
    assert verdict("P2.e", "study", tmp_path).verdict == "refuted"


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
        for operation in ("laplacian_kernel", "newton_schulz_inverse")
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


def test_trend_with_depth_is_reversed_by_rising_models_alone():
    def model(name, trend, spread=0.05, n=16):
        def trend_row(control, value, spread):
            interval = {"spread": spread, "spread_kind": "standard deviation over windows", "n": n}
            labels = {"metric": "graph_change_trend", "model": name, "control": control}
            return labels | interval | {"value": value}

        changes = [
            {"metric": "graph_change", "control": "trained", "model": name, "layer": layer, "value": 1.0}
            for layer in range(1, 7)
        ]
        controls = [trend_row("depth_shuffled", 0.0, 0.2), trend_row("random_init", 0.1, 0.05)]
        return [*changes, *controls, trend_row("trained", trend, spread)]

    def outcome(*trends):
        rows = [row for index, trend in enumerate(trends) for row in model(f"m{index}", trend)]
        return DECISIONS["graph_convergence"](frame(*rows)).outcome

    assert outcome(-0.9, -0.9, 0.9) is Outcome.MET
    assert outcome(-0.9, 0.9, 0.9) is Outcome.MIXED
    assert outcome(-0.1, 0.9, 0.9) is Outcome.REVERSE
    assert outcome(-0.1, 0.2, 0.9) is Outcome.NOT_MET
    with pytest.raises(Lacking, match="the trend of b has no 95 % interval"):
        DECISIONS["graph_convergence"](frame(*model("a", -0.9), *model("b", -0.9, spread=math.nan)))


def test_tangency_is_judged_with_the_paths_of_pretrained_models():
    def outcome(defect, *shares, half=0.01, models=()):
        flow = {"metric": "defect", "check": "tangency", "control": "none", "value": defect}
        interval = {"spread": half, "spread_kind": "95 % interval"}
        paths = [
            {"metric": "tangential_share_excess", "model": model, "value": share} | interval
            for model, share in zip(models or [f"m{index}" for index in range(len(shares))], shares, strict=True)
        ]
        return DECISIONS["tangent_flow"](frame(flow, *paths)).outcome

    assert outcome(1e-16, 0.1, 0.2) is Outcome.MET
    assert outcome(1e-16, 0.1, -0.2) is Outcome.MIXED
    assert outcome(1e-4, 0.0, 0.0) is Outcome.NOT_MET
    assert outcome(0.5, -0.1, -0.1) is Outcome.REVERSE
    with pytest.raises(Lacking, match="tangential share excess of m0 has no 95 % interval"):
        outcome(1e-16, 0.1, half=math.nan)
    own = "decoder-6k-s0-step9"
    assert outcome(1e-16, 0.1, -0.2, models=("m0", own)) is Outcome.MET
    with pytest.raises(Lacking, match="paths of pretrained models have not been measured"):
        outcome(1e-16, 0.1, models=(own,))


def test_fiber_bundle_rules():
    rank = {"metric": "score_rank", "form": "query", "dimension": 3, "tokens": 64, "value": 10.0, "predicted": 10}
    rank |= {"control": False}
    assert DECISIONS["score_rank"](frame(rank)).outcome is Outcome.MET
    dot = rank | {"form": "dot", "predicted": 3, "control": True}
    both = DECISIONS["score_rank"](frame(rank | {"tokens": 10}, dot))
    assert "1 of 1 ranks of heterogeneous metrics as predicted (1 limited by" in both.reason
    assert "0 of 1 of the controls" in both.reason
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
    assert DECISIONS["predictions"](frame(predicted | {"value": 0.0})).outcome is Outcome.NOT_MET
    assert DECISIONS["predictions"](frame(predicted | {"value": -1.0})).outcome is Outcome.REVERSE
    assert DECISIONS["score_rank"](frame(rank | {"value": 9.0})).outcome is Outcome.NOT_MET
    assert DECISIONS["score_rank"](frame(rank | {"value": 5.0})).outcome is Outcome.REVERSE
    slow = [row | {"value": value} for row, value in zip(cost, (1.4, 2.5, 0.3), strict=True)]
    assert DECISIONS["metric_cost"](frame(*slow)).outcome is Outcome.NOT_MET
    cubic = [row | {"value": value} for row, value in zip(cost, (3.0, 3.0, 2.0), strict=True)]
    assert DECISIONS["metric_cost"](frame(*cubic)).outcome is Outcome.REVERSE
    failed = (trained[0] | {"value": 0.0}, trained[1] | {"value": 1.0})
    assert DECISIONS["fiber_bundle_trains"](frame(*failed)).outcome is Outcome.REVERSE


@pytest.mark.parametrize(("factor", "outcome"), [(20.0, Outcome.MET), (2.0, Outcome.NOT_MET), (0.5, Outcome.REVERSE)])
def test_rank_collapse_needs_ten_times_in_four_of_five_seeds(factor, outcome):
    def rows(seeds):
        return [
            {"metric": "last_layer_relative_residual", "form": form, "seed": seed, "phase": phase, "value": value}
            for seed in range(seeds)
            for phase in ("init", "trained")
            for form, value in (("euclidean", 1.0), ("constant", 0.5), ("heterogeneous", factor if seed else 1.0))
        ]

    assert DECISIONS["rank_collapse"](frame(*rows(5))).outcome is outcome
    kept = [
        {"metric": "layers_kept", "form": form, "seed": seed, "phase": "wide 16", "value": float(value + seed)}
        for seed in range(5)
        for form, value in (("euclidean", 3), ("constant", 4), ("heterogeneous", 7))
    ]
    beside = DECISIONS["rank_collapse"](frame(*rows(5), *kept))
    assert beside.outcome is outcome
    assert "tokens differ by 1e-6: wide 16 9.0, +3.0 (± 0.0) against the best other" in beside.reason
    with pytest.raises(Lacking, match="4 seeds of at least 5"):
        DECISIONS["rank_collapse"](frame(*rows(4)))
    with pytest.raises(Lacking, match="not every metric has been measured with every seed"):
        DECISIONS["rank_collapse"](frame(*rows(5)[1:]))


def test_evidence_of_runs_and_records_becomes_one_frame(tmp_path):
    runs = [path for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=1) if path.name == "final.json"]
    path = tmp_path / "analyses" / "variational.json"
    records.write(path, [records.Record(metric="m", value=1.0, n=1)])
    found = claims.read_evidence([*runs, path])
    assert set(found["metric"]) == {"m", "top1", "parameters"}
