"""One run of the whole DAG at smoke size, shared by the tests of this folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workflow.project_copy import ProjectCopy, copy_project


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectCopy]:
    """A copy in a path with a space, whose demo preset is the smoke preset, after `snakemake --cores 8 all`."""
    copy = copy_project(tmp_path_factory.mktemp("work flow") / "attn geo")
    shutil.rmtree(copy.root / "config" / "demo")
    shutil.copytree(copy.root / "config" / "smoke", copy.root / "config" / "demo")
    copy.run("snakemake --cores 8 all", timeout=900)
    yield copy
    shutil.rmtree(copy.root, ignore_errors=True)


@pytest.fixture
def finished_copy(finished: ProjectCopy, tmp_path: Path) -> ProjectCopy:
    """A copy of the finished project with its times and its memory of what ran, to be edited."""
    shutil.copytree(finished.root, tmp_path / "attn geo", symlinks=True)
    return ProjectCopy(tmp_path / "attn geo")


@pytest.fixture
def fresh(tmp_path: Path) -> ProjectCopy:
    """A copy in which nothing has run."""
    return copy_project(tmp_path / "attn geo")
