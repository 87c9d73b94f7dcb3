"""What the tests of pages rely on: the browser notes what a page asks for and where it fails, and types as a reader."""

from pathlib import Path

from tests.browser import Browser

PAGE = """<!DOCTYPE html><title>ü</title><meta name="viewport" content="width=device-width"><script src="https://elsewhere.invalid/a.js"></script>
<details><summary>more</summary>text</details><script>throw new Error("broken")</script>"""


def test_requests_errors_and_keys_are_those_of_the_page(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "a page.html"
    file.write_text(PAGE, encoding="utf-8")
    with browser.page(file.as_uri(), width=360, height=640) as page:
        assert page.evaluate("[document.title, innerWidth]") == ["ü", 360]
        assert [address for address in page.requests if address.startswith("http")] == [
            "https://elsewhere.invalid/a.js"
        ]
        assert len(page.errors) == 1
        assert "broken" in page.errors[0]
        page.press("Tab", "Enter")
        assert page.wait_for("document.querySelector('details').open")
        assert page.screenshot(tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    with browser.page(file.as_uri()) as page:
        assert page.evaluate("innerWidth") == 1200
        assert page.evaluate("new Promise(done => setTimeout(() => done(7), 20))") == 7
