"""HTML pages that open from a folder, without a network: one look, styles inside, from the package's templates."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from attngeo.files import write_aside


def render_page(template: str, **values: Any) -> str:
    """The page that a template of this package makes of the values; every text is escaped, a missing one an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (files("attngeo.paper") / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def write_text(path: str | Path, text: str) -> None:
    """Write a page, complete or not at all."""
    with write_aside(path) as stream:
        stream.write(text)
