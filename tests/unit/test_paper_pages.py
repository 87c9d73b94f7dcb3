"""Pages open from their folder alone, hold what they promise and escape what results say."""

import importlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from attngeo.files import read_json, write_json
from attngeo.paper import claims, gallery, ledger, render
from attngeo.paper.answers import Answer, read_answers
from attngeo.paper.claims import evaluate
from attngeo.paper.findings import QUESTIONS
from attngeo.paper.targets import FIGURES, TABLES, TARGETS
from tests.browser import Browser
from tests.page_checks import assert_ledger_works_from_the_keyboard
from tests.unit import paper_results

MADE = ("fig2", "fig10", "tab1", "tab9", "findings")


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


def test_ledger_explains_every_verdict_and_colours_each_by_a_class_of_its_own(tmp_path):
    for model in ("a", "bb"):
        paper_results.write_connection_walk(tmp_path, model, excess=-0.02)
    text = ledger.page(evaluate("demo", tmp_path))
    page = Page(text)
    for name in claims.VerdictName:
        assert name.meaning in page.text
        assert f".{name.replace(' ', '-')} {{" in text
    badges = [value for tag, name, value in page.attributes if (tag, name) == ("span", "class") and "badge" in value]
    assert len(badges) == len(claims.VerdictName) + len(claims.claims())
    assert badges.count("badge indicated-against") == 2, "in the legend, and on P3.e"
    assert "badge indicated against" not in text


def test_page_is_self_contained_and_shows_every_claim(tmp_path):
    paper_results.write_variational(tmp_path)
    ledger.write_page("demo", tmp_path, tmp_path / "claims.html")
    text = (tmp_path / "claims.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("details") == len(claims.claims())
    assert not {"link", "img", "iframe", "base", "object"} & set(page.tags)
    assert [a for a in page.attributes if a[1] in ("src", "href", "srcset", "action") or a[1].startswith("on")] == [
        ("a", "href", "index.html")
    ]
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttpRequest", text)
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    for claim in claims.claims():
        assert claim.statement in page.text
        assert claim.refuted in page.text
    assert "at least 16 windows, 128 tokens a window" in page.text


def test_page_escapes_what_results_say(tmp_path):
    hostile = '<script>alert("x")</script>'
    for path in paper_results.write_runs(tmp_path, datasets=["d"], seeds=3):
        if path.name == "final.json":
            write_json(path, read_json(path) | {"dataset": hostile})
    text = ledger.page(evaluate("demo", tmp_path))
    assert hostile not in text
    assert "&lt;script&gt;" in text
    assert Page(text).tags.count("script") == 1


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A results folder with some figures and tables drawn from invented numbers, and both pages."""
    folder = tmp_path_factory.mktemp("pa ges") / "demo"
    inputs = paper_results.write_everything(folder)
    for name in MADE:
        target = TARGETS[name]
        module, stem = importlib.import_module(target.module), folder / f"{target.kind}s" / name
        if target.kind == "figure":
            render.write_figure(module.draw(inputs[name]), stem)
        else:
            render.write_table(module.tabulate(inputs[name]), stem)
    made_from = {name: [path.relative_to(folder).as_posix() for path in inputs[name]] for name in MADE}
    findings = folder / "tables" / "findings.csv"
    ledger.write_page("demo", folder, folder / "claims.html", [*inputs["tab9"], findings], made_from)
    gallery.write_page("demo", folder, folder / "index.html", [findings], made_from)
    return folder


def test_pages_lead_with_the_findings(made):
    answers = read_answers([made / "tables" / "findings.csv"])
    assert [answer.question for answer in answers] == list(QUESTIONS.values())
    for name in ("claims", "index"):
        text = Page((made / f"{name}.html").read_text(encoding="utf-8")).text
        for answer in answers:
            assert (
                text.index(answer.question)
                < text.index(answer.answer)
                < text.index("P1.a" if name == "claims" else "tab9")
            )


def test_each_claim_shows_the_figures_and_tables_of_it_that_are_made(made):
    page = Page((made / "claims.html").read_text(encoding="utf-8"))
    pictures = {value for tag, name, value in page.attributes if (tag, name) == ("img", "src")}
    assert pictures == {"figures/fig2.png", "figures/fig10.png"}
    links = {value for tag, name, value in page.attributes if (tag, name) == ("a", "href")}
    assert {"index.html#tab1", "index.html#findings"} <= links
    assert not any("fig9" in link for link in links)


@pytest.mark.parametrize("name", MADE)
def test_each_item_names_rule_module_data_tracked_run_and_claims(made, name):
    text = (made / "index.html").read_text(encoding="utf-8")
    item = re.search(rf'<article id="{name}".*?</article>', text, re.DOTALL)[0]
    target = TARGETS[name]
    for link in (
        "../../workflow/rules/paper.smk",
        f"../../src/{target.module.replace('.', '/')}.py",
        *(f"claims.html#{claim}" for claim in target.claim_ids),
        f"{'../../results/demo/figures' if name in FIGURES else 'tables'}/{name}.csv",
    ):
        assert f'href="{link}"' in item
    assert f"snakemake paper_figures/{name}.{'pdf' if name in FIGURES else 'tex'} --config preset=demo" in item
    assert "make ui" in item
    assert re.search(rf"attributes.run_name = .{{1,5}}{name}", item)
    caption = (made / f"{target.kind}s" / f"{name}.caption.txt").read_text(encoding="utf-8").strip()
    assert caption in Page(item).text
    if name in TABLES:
        assert Page(item).tags.count("tr") == len(pd.read_csv(made / f"tables/{name}.csv")) + 1


def test_pages_hold_their_width_on_a_phone_and_ask_for_nothing(browser: Browser, made: Path) -> None:
    for name in ("claims", "index"):
        with browser.page((made / f"{name}.html").as_uri(), width=360, height=640) as page:
            page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            assert page.evaluate("document.documentElement.scrollWidth") == 360
            assert not page.errors
            assert {address.partition(":")[0] for address in page.requests} <= {"file"}


def test_the_ledger_is_worked_from_the_keyboard(browser: Browser, made: Path) -> None:
    assert_ledger_works_from_the_keyboard(browser, made / "claims.html")


def test_answers_survive_the_file_they_are_read_from(tmp_path):
    assert read_answers([tmp_path / "tab9.csv"]) == []
    (tmp_path / "findings.csv").write_text('question,answer,claim,verdict,shown in\n"a, b?","1 < 2",P4.e,,fig14\n')
    assert read_answers([tmp_path / "findings.csv"]) == [Answer("a, b?", "1 < 2", "P4.e", "", "fig14")]
    text = ledger.page(evaluate("demo", tmp_path), [Answer("<b>?", "1 < 2", "P4.e", "", "fig14")])
    assert "<b>?" not in text
    assert "&lt;b&gt;?" in text
