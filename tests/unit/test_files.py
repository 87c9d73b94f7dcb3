"""Files are complete or absent, and numbers that are not finite survive them."""

import errno
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngeo.errors import UserError
from attngeo.files import decode_non_finite, encode_non_finite, path_aside, read_json, write_aside, write_json

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
def test_encoding_is_strict_json_and_comes_back(value: object) -> None:
    text = json.dumps(encode_non_finite(value), allow_nan=False)
    assert repr(decode_non_finite(json.loads(text))) == repr(_words_as_numbers(value))


def _words_as_numbers(value: object) -> object:
    return decode_non_finite(encode_non_finite(value))


def test_nan_and_infinities_come_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [math.nan, math.inf, -math.inf, 1.5]})
    nan, inf, minus, plain = read_json(tmp_path / "a.json")["x"]
    assert math.isnan(nan)
    assert (inf, minus, plain) == (math.inf, -math.inf, 1.5)


def test_an_error_while_writing_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "naïve name.json"
    write_json(path, {"good": 1})

    def write_badly() -> None:
        with write_aside(path) as stream:
            stream.write("half")
            raise KeyError

    with pytest.raises(KeyError):
        write_badly()
    assert read_json(path) == {"good": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_is_explained(tmp_path: Path, number: int) -> None:
    path = tmp_path / "figure.pdf"

    def fill_the_disk() -> None:
        with path_aside(path) as aside:
            aside.write_bytes(b"part")
            raise OSError(number, "no")

    with pytest.raises(UserError, match=r"figure\.pdf"):
        fill_the_disk()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": 1'])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "final.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"final\.json"):
        read_json(path)
    with pytest.raises(UserError, match="does not exist"):
        read_json(tmp_path / "absent.json")
