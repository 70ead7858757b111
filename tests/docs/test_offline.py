import pytest

from docs.hooks.offline import loaded_from_elsewhere


@pytest.mark.parametrize(
    "text",
    [
        '<script defer src="https://a.b/c.js"></script>',
        '<link rel="stylesheet" href="//a.b/c.css">',
        '<link href="https://a.b/f" rel="preconnect">',
        "<img alt='x' src='http://a.b/c.png'>",
        '@import "https://a.b/c.css";',
        "src: url(https://a.b/c.woff2)",
    ],
)
def test_what_a_network_would_serve_is_named(text: str) -> None:
    assert len(loaded_from_elsewhere(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://a.b/c">c</a>',
        '<link rel="canonical" href="https://a.b/c.html">',
        '<script src="assets/a.js"></script>',
        "url(data:image/svg+xml;charset=utf-8,<svg xmlns='http://www.w3.org/2000/svg'/>)",
    ],
)
def test_links_and_local_files_are_allowed(text: str) -> None:
    assert loaded_from_elsewhere(text) == []
