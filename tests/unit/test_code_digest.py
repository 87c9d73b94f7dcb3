"""A digest changes with the code that a result depends on, and with nothing else."""

import json
import os
import time
from pathlib import Path

import pytest

from attngeo.tracking.code_digest import CodeDigest, read_stamp, strip_c_comments, write_stamp

FILES = {
    "src/attngeo/__init__.py": "",
    "src/attngeo/errors.py": "class UserError(Exception): ...",
    "src/attngeo/ops/__init__.py": (
        "from attngeo.ops.one import one\nfrom attngeo.ops.two import two\nTABLE = {'one': one, 'two': two}\n"
    ),
    "src/attngeo/ops/one/__init__.py": "from . import compiled, naive\n\ndef one(x):\n    return naive.one(x)\n",
    "src/attngeo/ops/one/naive.py": '"""Doc."""\n\ndef one(x):\n    """Doc."""\n    return x + 1\n',
    "src/attngeo/ops/one/compiled.py": "import attngeo_ext\n",
    "src/attngeo/ops/two/__init__.py": "def two(x):\n    return f'{x!r} two'\n",
    "src/attngeo/ops/two/compiled.py": "",
    "src/attngeo/job_one.py": "from attngeo.errors import UserError\nfrom attngeo.ops import one\nprint(one(1))\n",
    "src/attngeo/job_two.py": "def later():\n    from attngeo.ops.two import two\n    return two(1)\n",
    "cuda_ext/setup.py": "VERSION = 1\n",
    "cuda_ext/attngeo_ext/__init__.py": "",
    "cuda_ext/csrc/ops.cpp": "int shared; // all\n",
    "cuda_ext/csrc/cpu/one.cpp": 'const char* s = "// kept"; /* gone */ int one;\n',
    "cuda_ext/csrc/cpu/two.cpp": "int two;\n",
    "requirements.lock": "# pins\ntorch==2.14.1\nnumpy==2.4.6\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digests(root: Path) -> tuple[str, str]:
    code = CodeDigest(root, root / "cache.json")
    pair = tuple(code.explain([f"attngeo.job_{name}"], packages=("torch",))["digest"] for name in ("one", "two"))
    code.save_cache()
    return pair  # type: ignore[return-value]


def edited(root: Path, name: str, old: str, new: str) -> tuple[bool, bool]:
    """Which of the two jobs' digests an edit changes."""
    before = digests(root)
    file = root / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    after = digests(root)
    file.write_text(text)
    assert digests(root) == before, "a reverted edit must bring the digest back"
    return before[0] != after[0], before[1] != after[1]


@pytest.mark.parametrize(
    ("name", "old", "new", "changes"),
    [
        ("src/attngeo/ops/one/naive.py", "x + 1", "x + 2", (True, False)),
        ("src/attngeo/ops/one/naive.py", "x + 1", "x + 1  # why", (False, False)),
        ("src/attngeo/ops/one/naive.py", "x + 1", "(x  +  1)", (False, False)),
        ("src/attngeo/ops/one/naive.py", '    """Doc."""', '    """Other."""', (False, False)),
        ("src/attngeo/ops/one/naive.py", '"""Doc."""\n\n', "", (False, False)),
        ("src/attngeo/ops/two/__init__.py", "x!r", "x!s", (False, True)),
        ("src/attngeo/ops/__init__.py", "'one': one", "'uno': one", (False, False)),
        ("src/attngeo/errors.py", "...", "pass", (False, False)),
        ("src/attngeo/job_two.py", "two(1)", "two(2)", (False, True)),
        ("cuda_ext/csrc/cpu/one.cpp", "int one", "int uno", (True, False)),
        ("cuda_ext/csrc/cpu/one.cpp", "// kept", "// string", (True, False)),
        ("cuda_ext/csrc/cpu/one.cpp", "/* gone */", "/* other */", (False, False)),
        ("cuda_ext/csrc/cpu/two.cpp", "int two", "int dos", (False, False)),
        ("cuda_ext/csrc/ops.cpp", "int shared", "int all", (True, False)),
        ("cuda_ext/csrc/ops.cpp", "// all", "// each", (False, False)),
        ("requirements.lock", "torch==2.14.1", "torch==2.14.2", (True, True)),
        ("requirements.lock", "numpy==2.4.6", "numpy==2.4.7", (False, False)),
    ],
)
def test_what_an_edit_changes(tree: Path, name: str, old: str, new: str, changes: tuple[bool, bool]) -> None:
    assert edited(tree, name, old, new) == changes


def test_values_and_files_count(tree: Path) -> None:
    code = CodeDigest(tree)
    own = tree / "my_attention.py"
    own.write_text("A = 1\n")
    first = code.explain([], values={"lr": 0.1}, files=[own])["digest"]
    assert code.explain([], values={"lr": 0.2}, files=[own])["digest"] != first
    own.write_text("A = 1  # comment\n")
    assert CodeDigest(tree).explain([], values={"lr": 0.1}, files=[own])["digest"] == first
    own.write_text("A = 2\n")
    assert CodeDigest(tree).explain([], values={"lr": 0.1}, files=[own])["digest"] != first


def test_a_missing_module_and_a_syntax_error_are_named(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"attngeo\.absent"):
        CodeDigest(tree).closure(["attngeo.absent"])
    (tree / "src/attngeo/job_one.py").write_text("def :\n")
    with pytest.raises(SyntaxError, match=r"job_one\.py"):
        CodeDigest(tree).closure(["attngeo.job_one"])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"k": 1}'])
def test_a_damaged_cache_or_stamp_is_made_anew(tree: Path, content: str) -> None:
    good = digests(tree)
    (tree / "cache.json").write_text(content if content != "[]" else "{}")
    assert digests(tree) == good
    stamp = tree / "stamp.txt"
    stamp.write_text(content)
    write_stamp(stamp, {"digest": "abc"})
    assert read_stamp(stamp)["digest"] == "abc"


def test_a_stamp_keeps_its_time_while_its_digest_stays(tmp_path: Path) -> None:
    stamp = tmp_path / "a" / "stamp.txt"
    write_stamp(stamp, {"digest": "abc", "modules": {}})
    os.utime(stamp, (1, 1))
    write_stamp(stamp, {"digest": "abc", "modules": {"more": "detail"}})
    assert stamp.stat().st_mtime == 1
    write_stamp(stamp, {"digest": "abd"})
    assert stamp.stat().st_mtime > 1
    assert json.loads(stamp.read_text()) == {"digest": "abd"}


def test_comments_of_c_are_stripped_and_strings_kept() -> None:
    source = 'a = "/* no */ // no"; // yes\n/* many\n lines */ b = \'"\'; // "\nc;'
    assert strip_c_comments(source) == 'a = "/* no */ // no";\nb = \'"\';\nc;'


def test_the_real_tree_is_digested_within_half_a_second() -> None:
    root = Path(__file__).resolve().parents[2]
    start = time.monotonic()
    closure = CodeDigest(root).closure(["attngeo.jobs.train"])
    assert "attngeo.training.loop" in closure
    assert "attngeo.layers.laplacian" not in closure, "a kind is in a run's digest only if the run names it"
    assert not any(module.startswith("attngeo.tracking") for module in closure)
    print(f"closure of a training without a cache: {time.monotonic() - start:.2f} s")
