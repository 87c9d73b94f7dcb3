"""Job: the licences of the data and models that a preset uses."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from attngeo.config import Preset
from attngeo.data import embedded
from attngeo.files import write_aside

OF_THE_OWNER = "that of the folder's owner"
ON_THE_HUB = "on the model's card on the hub"
PHOTOGRAPHS = "textile"  # what pretrained vision models look at


@dataclass(frozen=True)
class Used:
    """One set of data or one model that a preset uses."""

    name: str
    what: str
    licence: str
    origin: str


def used(preset: Preset) -> list[Used]:
    """Everything that the preset takes from elsewhere: images, pretrained models, texts."""
    found = [_used(name, "images", dataset.source) for name, dataset in preset.datasets.items()]
    found += [_used(model.id, "language model", model.source) for model in preset.language_models]
    found += [_used(model.id, "vision model", model.source) for model in preset.vision_models]
    if preset.vision_models:
        found.append(_used(PHOTOGRAPHS, "images", "embedded"))
    tasks = preset.fiber_bundle.tasks if preset.fiber_bundle else ()
    found += [_used(task, "images", "embedded") for task in tasks if task in embedded.sources()]
    if preset.language_models or preset.decoder_models or "characters" in tasks:
        found += list(_texts(preset.texts))
    return list(dict.fromkeys(found))


def write_licences(preset: Preset) -> Path:
    """Write results/<preset>/licences.md; its path."""
    out = preset.results / "licences.md"
    rows = [f"| {' | '.join(_cell(text) for text in (u.name, u.what, u.licence, u.origin))} |" for u in used(preset)]
    table = ["| name | what | licence | from |", "| --- | --- | --- | --- |", *rows]
    lead = (
        f"Data and models that preset {preset.name} uses, each under the licence of its owner. Nothing of them is part "
        "of this project, but the texts called embedded; LICENSE and NOTICE files that come with a fetched model lie "
        "beside its weights in the cache (`attngeo fetch` lists what is there). Trained weights and figures made of "
        "them may be bound by these licences."
    )
    with write_aside(out) as stream:
        stream.write("\n".join([f"# Licences, preset {preset.name}", "", lead, "", *table]) + "\n")
    return out


def _used(name: str, what: str, source: str) -> Used:
    if source == "embedded":
        entry = embedded.sources()[name]
        return Used(name, what, entry.licence, entry.origin)
    if source == "hub" or source.startswith("hub:"):
        return Used(name, what, ON_THE_HUB, source)
    return Used(name, what, OF_THE_OWNER, source)


def _texts(source: str) -> Iterator[Used]:
    if source != "embedded":
        yield Used(source, "texts", OF_THE_OWNER, source)
        return
    notice = (files("attngeo.data") / "text" / "LICENCE.md").read_text(encoding="utf-8")
    yield Used("texts", "texts", "public domain", " ".join(notice.split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
