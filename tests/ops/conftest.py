"""Fixtures of the operator tests: implementations, kinds and instruction sets; what is missing is skipped visibly."""

from collections.abc import Iterator

import pytest

from attngeo.ops import backend as _backend
from tests.ops.references import FORMS, KINDS, Kind


@pytest.fixture
def extension() -> None:
    """Skip unless the compiled operators can be used."""
    if _backend._extension_problem:
        pytest.skip(_backend._extension_problem)


@pytest.fixture(params=["naive", "compiled"])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of an implementation."""
    if request.param == "compiled":
        request.getfixturevalue("extension")
    return str(request.param)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    """A pairwise kernel."""
    found: Kind = request.param
    return found


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """What is asked of a pairwise kernel."""
    return str(request.param)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def variant(request: pytest.FixtureRequest, extension: None) -> Iterator[str]:
    """Each instruction set in turn."""
    import attngeo_ext

    try:
        attngeo_ext.use_cpu_variant(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield str(request.param)
    attngeo_ext.use_cpu_variant("")
