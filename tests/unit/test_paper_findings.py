"""The three findings are filled from records, and say that they are untested where there are none."""

import pytest

from attngeo.files import read_json, write_json
from attngeo.paper import findings
from attngeo.paper.findings import QUESTIONS, UNTESTED
from attngeo.paper.tables import findings as table
from tests.unit import paper_results


def by_claim(paths):
    """The answers by the claim that they belong to."""
    return {answer.claim: answer for answer in findings.answers(paths)}


def finals(paths):
    return [path for path in paths if path.name == "final.json"]


def test_without_a_number_every_finding_is_untested(tmp_path):
    walk = paper_results.write_connection_walk(tmp_path / "demo", "only-one")
    found = by_claim([walk])
    assert [answer.question for answer in found.values()] == list(QUESTIONS.values())
    assert found["P2.f"].answer.startswith(f"{UNTESTED}: no run")
    assert found["P4.e"].answer.startswith(f"{UNTESTED}: not run in preset demo")
    assert "1 sizes of one family" in found["P3.f"].answer


def test_the_replication_is_answered_by_the_rule_of_table_4(tmp_path):
    paths = finals(paper_results.write_ablation(tmp_path / "study", paper_results.ABLATION))
    answer = by_claim(paths)["P2.f"].answer
    assert "all five together change the gap to softmax by -10.2 (± " in answer
    assert "Alone, a part of it is explained by 5 solver" in answer
    some = {options: values for options, values in paper_results.ABLATION.items() if options != paper_results.ALL_FIVE}
    paths = finals(paper_results.write_ablation(tmp_path / "without", some))
    assert by_claim(paths)["P2.f"].answer.startswith(UNTESTED)


def test_what_was_measured_and_leaves_a_question_open_is_not_called_untested(tmp_path):
    walks = paper_results.write_decoders(tmp_path / "study")
    for walk in walks:
        if "-s1-" in walk.name:
            content = read_json(walk)
            content["records"] = [
                record | ({"value": -0.5 * record["value"]} if record["metric"] == "graph_change_trend" else {})
                for record in content["records"]
            ]
            write_json(walk, content)
    answer = by_claim(walks)["P3.f"]
    assert answer.verdict == "partly"
    assert "(by seed +1.00, -1.00)" in answer.answer
    assert "untested" not in answer.answer
    demo = paper_results.write_decoders(tmp_path / "demo")
    assert by_claim(demo)["P3.f"].verdict == "indicated"


@pytest.mark.parametrize(("sizes", "said"), [(3, True), (2, False)])
def test_scale_is_told_before_and_after_the_null(tmp_path, sizes, said):
    walks = paper_results.write_decoders(tmp_path / "study", sizes=sizes)
    answer = by_claim(walks)["P3.f"].answer
    assert ("before the null is taken off" in answer) == said
    assert ("score of decoder float32 " in answer) == said
    assert ("untested" in answer) != said


def test_table_says_whose_the_numbers_are_and_reads_back_in_latex(tmp_path):
    walk = paper_results.write_connection_walk(tmp_path / "demo", "only-one")
    made = table.tabulate([walk])
    assert "kind: ours" in made.caption
    assert "preset demo" in made.caption
    assert made.frame["shown in"].tolist() == ["tab4", "fig11", "fig14"]
