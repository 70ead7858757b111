"""The page draws with the versions that drew its pictures."""

import gzip
from importlib.resources import files

import pytest

from harness.tell.pictures.drawing import VEGA_LITE
from harness.tell.writers.html import VEGA


def test_the_page_has_the_versions_of_the_renderer() -> None:
    vl_convert = pytest.importorskip("vl_convert")
    packed = files("harness.tell.writers").joinpath(VEGA).read_bytes()
    text = gzip.decompress(packed).decode("utf-8")
    assert f'version="{vl_convert.get_vega_version()}"' in text
    assert f'"{VEGA_LITE}.0"' in text
    assert VEGA_LITE in vl_convert.get_vegalite_versions()
