"""Every test process computes with one thread, beside the other workers; a test that needs more says so itself.

After the number of threads was raised above that of the cores and lowered to another above 1, torch's own LU (oneMKL)
fails in that process; at one thread it does not.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.browser import Browser, launched

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One headless Chromium for all tests of pages in this process."""
    with launched(tmp_path_factory.mktemp("browser")) as running:
        yield running
