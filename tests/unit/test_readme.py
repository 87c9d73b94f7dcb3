"""What the README and the guides say exists: commands, make targets, files; tables are those of results in git."""

import re
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from attngeo.cli import app
from attngeo.layers.registry import ATTENTION_KINDS, attention_options
from tests.documents import GUIDES, README, ROOT, USER_DOCUMENTS

DOCUMENTS = {
    "README.md": README,
    "ARCHITECTURE.md": (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"),
    **{f"docs/guide/{name}.md": text for name, text in GUIDES.items()},
}


def code_of(text: str) -> list[str]:
    """Lines of fenced shell blocks and inline code."""
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_make_target_named_exists(name: str) -> None:
    named = {m for line in code_of(DOCUMENTS[name]) for m in re.findall(r"\bmake ([a-z][a-z-]*)", line)}
    defined = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert named <= defined, named - defined


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_named_exists(name: str) -> None:
    commands = {m for line in code_of(DOCUMENTS[name]) for m in re.findall(r"\battngeo ([a-z][a-z -]*[a-z])", line)}
    runner = CliRunner()
    for command in commands:
        words = command.split()
        words = words[: 2 if words[0] in ("analyze", "benchmark", "track") else 1]
        answer = runner.invoke(app, [*words, "--help"])
        assert answer.exit_code == 0, f"attngeo {' '.join(words)}: {answer.output}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_linked_exists(name: str) -> None:
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", DOCUMENTS[name]):
        if "://" in target:
            continue
        file = (ROOT / name).parent / target if target else ROOT / name
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)$", file.read_text(encoding="utf-8"))
            known = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in known, f"{target}#{anchor}"


def test_every_guide_is_linked_from_the_readme() -> None:
    assert [name for name in GUIDES if f"](docs/guide/{name}.md)" not in README] == []


def test_every_worked_example_is_run_by_a_test() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("test_*.py")))
    examples = re.findall(r"<!-- example: (\S+) -->\n```bash\n", USER_DOCUMENTS)
    assert len(set(examples)) == len(examples) >= 6
    for name in examples:
        assert re.search(rf'example\((\w+, )?"{name}"\)', tests), f"no test runs {name}"


def test_every_preset_is_described() -> None:
    for file in sorted((ROOT / "config").glob("*/config.yaml")):
        assert f"`{file.parent.name}`" in README, file.parent.name
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert content["expected"], file


def test_every_attention_kind_and_option_named_is_one_and_none_is_left_out() -> None:
    table = README.partition("<!-- kinds -->")[2].partition("<!-- end -->")[0]
    assert re.findall(r"(?m)^\| `(\w+)` ", table) == list(ATTENTION_KINDS)
    guide = GUIDES["attention_kinds"]
    paragraph = guide.partition("Each decision behind a kind")[2].partition("`layer.attention_rows")[0]
    options = set(re.findall(r"`([a-z_]+)`", paragraph)) | {"statistics", "form"}
    known = {option for kind in ATTENTION_KINDS for option in attention_options(kind)}
    assert options <= known, options - known


def test_the_tables_are_those_of_the_results_in_git() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from snapshot import with_tables
    finally:
        sys.path.pop(0)
    named = re.findall(r"<!-- table: (\S+)", README)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert with_tables(README, ROOT) == README, "run `make snapshot`"


def test_help_is_quick_and_needs_no_torch() -> None:
    script = (
        "import sys, attngeo.cli as c; from typer.main import get_command; get_command(c.app);"
        "heavy = {'torch', 'pandas', 'mlflow', 'matplotlib', 'transformers', 'timm'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_importing_the_package_registers_its_models_with_timm() -> None:
    looked_for = "import attngeo, importlib.util; importlib.util.find_spec('timm'); import timm"
    for script in ("import attngeo, timm", "import timm, attngeo", looked_for):
        check = f"{script}; timm.create_model('laplacianformer_nano', num_classes=3)"
        subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)
