"""What holds for every page that the project writes: whole without a network, on a phone, and from the keyboard."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.browser import Browser, Page

PHONE = (360, 640)
DESK = (1200, 800)
_LINKS = "[...document.querySelectorAll('a[href], img[src], link[href], script[src]')].map(e => e.href || e.src)"
_PICTURES = "Promise.all([...document.images].map(i => { i.loading = 'eager'; return i.decode(); })).then(() => true)"
# Whatever takes part in the width of the document, or cannot be read without scrolling sideways.
_TOO_WIDE = (
    "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5"
    " && !e.closest('.scroll *')).map(e => e.outerHTML.slice(0, 200))"
)


def assert_page_stands_alone(browser: Browser, file: Path) -> None:
    """No request leaves the folder, nothing fails, every link and picture is there, and nothing sticks out."""
    for width, height in (PHONE, DESK):
        with browser.page(file.resolve().as_uri(), width=width, height=height) as page:
            assert page.evaluate("innerWidth") == width, "the page sets no viewport"
            page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            assert page.evaluate(_PICTURES)
            assert page.evaluate(_TOO_WIDE) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.errors == []
            outside = [address for address in page.requests if not address.startswith(("file:", "data:"))]
            assert outside == []
            smallest = page.evaluate(
                "Math.min(...[...document.querySelectorAll('p, dd, td, summary, a')].map("
                "e => parseFloat(getComputedStyle(e).fontSize)))"
            )
            assert smallest >= 11, "letters too small to read on a phone"
            assert_links_lead_somewhere(page)


def assert_links_lead_somewhere(page: Page) -> None:
    """Every link of the page is to a file that exists, and to a place in it that exists."""
    for address in page.evaluate(_LINKS):
        parts = urlsplit(address)
        assert parts.scheme == "file", address
        target = Path(unquote(parts.path))
        assert target.exists(), f"{target} is linked and missing"
        if parts.fragment and target.suffix == ".html":
            assert f'id="{unquote(parts.fragment)}"' in target.read_text(encoding="utf-8"), address


def assert_ledger_works_from_the_keyboard(browser: Browser, file: Path) -> None:
    """Filters and claims are reached by Tab, changed by arrows and opened by Enter; a link to a claim opens it."""
    shown = "[...document.querySelectorAll('main > details')].filter(d => !d.hidden).map(d => d.id)"
    with browser.page(file.resolve().as_uri()) as page:
        everything = page.evaluate(shown)
        assert len(everything) == page.evaluate("document.querySelectorAll('main > details').length")
        _tab_to(page, "document.activeElement.id === 'paper'")
        page.press("ArrowDown")
        paper = page.wait_for("document.getElementById('paper').value")
        of_paper = page.evaluate(shown)
        assert 0 < len(of_paper) < len(everything)
        assert {page.evaluate(f"document.getElementById('{one}').dataset.paper") for one in of_paper} == {paper}
        _tab_to(page, "document.activeElement.id === 'verdict'")
        choices = page.evaluate("document.getElementById('verdict').options.length") - 1
        for _ in range(choices):
            page.press("ArrowDown")
            verdict = page.evaluate("document.getElementById('verdict').value")
            both = page.evaluate(shown)
            assert {page.evaluate(f"document.getElementById('{one}').dataset.verdict") for one in both} <= {verdict}
            assert page.evaluate("document.getElementById('none').hidden") == bool(both)
        page.press(*choices * ["ArrowUp"])
        assert page.evaluate(shown) == of_paper
        _tab_to(page, "document.activeElement.tagName === 'SUMMARY'")
        page.press("Enter")
        assert page.wait_for("document.activeElement.parentElement.open")
        words = page.evaluate("document.activeElement.parentElement.innerText")
        for part in ("Why this verdict", "Rule (ours)", "Deviations"):
            assert part in words
    with browser.page(f"{file.resolve().as_uri()}#{everything[-1]}") as page:
        assert page.evaluate("[...document.querySelectorAll('details[open]')].map(d => d.id)") == [everything[-1]]


def _tab_to(page: Page, reached: str) -> None:
    for _ in range(200):
        if page.evaluate(reached):
            return
        page.press("Tab")
    raise AssertionError(f"not reached by Tab: {reached}")
