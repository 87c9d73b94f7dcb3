"""Every preset can say under which licences its data and models stand."""

from pathlib import Path

import pytest
import yaml

from attngeo.config import load_preset
from attngeo.data import embedded
from attngeo.jobs import licences

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.parent.name for path in ROOT.glob("config/*/config.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_everything_that_a_preset_uses_has_a_licence(name: str) -> None:
    preset = load_preset(ROOT, name)
    found = {used.name: used for used in licences.used(preset)}
    assert {*preset.datasets, *(model.id for model in (*preset.language_models, *preset.vision_models))} <= set(found)
    for used in found.values():
        assert used.licence
        assert used.origin
        if used.licence not in (licences.OF_THE_OWNER, licences.ON_THE_HUB, "public domain"):
            assert used.licence == embedded.sources()[used.name].licence
    tasks = preset.fiber_bundle.tasks if preset.fiber_bundle else ()
    assert ("texts" in found) == bool(preset.language_models or preset.decoder_models or "characters" in tasks)
    assert {"fashion-mnist"} & {*tasks} <= set(found)


@pytest.mark.parametrize(
    ("task", "name", "licence"),
    [("characters", "texts", "public domain"), ("fashion-mnist", "fashion-mnist", "MIT"), ("copy", None, "")],
)
def test_what_the_tasks_of_the_fiber_bundle_read_has_a_licence(task: str, name: str | None, licence: str) -> None:
    preset = load_preset(ROOT, "tuning", {"fiber_bundle": {"tasks": {task: {"steps": 1}}}})
    read = {used.name: used for used in licences.used(preset.model_copy(update={"datasets": {}}))}
    assert set(read) == ({name} if name else set())
    if name:
        assert licence in read[name].licence


def test_folders_and_the_hub_keep_the_licences_of_their_owners(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "config" / "recipes").mkdir()
    content = {
        "description": "d",
        "expected": "e",
        "datasets": {"mine": {"source": "my|images"}},
        "language_models": [{"id": "gpt2", "source": "hub:openai-community/gpt2"}, {"id": "own", "source": "my_model"}],
        "texts": "my_texts",
        "figures": [],
        "tables": [],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    (folder / "runs.tsv").write_text("run_id\tmodel\tdataset\trecipe\tseed\tfeeds\n")
    preset = load_preset(tmp_path, "mine")
    assert [(used.name, used.licence) for used in licences.used(preset)] == [
        ("mine", licences.OF_THE_OWNER),
        ("gpt2", licences.ON_THE_HUB),
        ("own", licences.OF_THE_OWNER),
        ("my_texts", licences.OF_THE_OWNER),
    ]
    text = licences.write_licences(preset).read_text(encoding="utf-8")
    assert "| mine | images | that of the folder's owner | my\\|images |" in text
    assert text.startswith("# Licences, preset mine\n")


def test_the_citation_names_this_version_and_every_paper_of_the_ledger() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license", "references"} <= set(citation)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{citation["version"]}"' in project
    assert f'license = "{citation["license"]}"' in project
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for paper in citation["references"]:
        assert {"type", "title", "authors", "url"} <= set(paper)
        number = paper["url"].removeprefix("https://arxiv.org/abs/")
        assert f"arXiv {number}" in readme
    assert len(citation["references"]) == 4
