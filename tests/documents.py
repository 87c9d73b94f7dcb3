"""The README and the guides: what they promise, tests run."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/guide").glob("*.md"))}
USER_DOCUMENTS = "\n".join([README, *GUIDES.values()])


def example(name: str) -> str:
    """The shell block behind the only marker `<!-- example: name -->`."""
    found = re.findall(rf"<!-- example: {name} -->\n```bash\n(.*?)```", USER_DOCUMENTS, re.DOTALL)
    assert len(found) == 1, f"{len(found)} examples are called {name}"
    return str(found[0])
