"""Text that ships with the project."""

import pytest

from attngeo.data import text
from attngeo.errors import UserError


def test_documents_are_long_english_prose_and_small_in_all():
    documents = text.load()
    assert len(documents) == 12
    assert all(5_000 < len(document) < 8_000 for document in documents)
    assert sum(len(document.encode()) for document in documents) < 100_000
    assert all(" the " in document and "\r" not in document for document in documents)


def test_collections_are_parts_of_the_whole():
    assert text.load("moby-dick") + text.load("state-of-the-union") == text.load("public-domain")


def test_an_unknown_collection_is_named_with_the_known_ones():
    with pytest.raises(UserError, match=r"brown[\s\S]*moby-dick"):
        text.load("brown")
