"""Fixtures of the operator tests: both implementations, with the compiled one skipped visibly where it is missing."""

import pytest

from attngeo.ops import backend as _backend


@pytest.fixture
def extension() -> None:
    """Skip unless the compiled operators can be used."""
    if _backend._extension_problem:
        pytest.skip(_backend._extension_problem)


@pytest.fixture(params=["naive", "compiled"])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of an implementation of the Laplacian kernel."""
    if request.param == "compiled":
        request.getfixturevalue("extension")
    return str(request.param)
