"""Documents become clean text, or say why not; passages are found by words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from midflight.tools import ToolError
from midflight.tools.reading.documents import document_text
from midflight.tools.reading.passages import best_passages, excerpt, paragraphs, split_passages
from tests.tools.pdf import pdf

pytest.importorskip("trafilatura")
pytest.importorskip("pypdf")

ARTICLE = """<!DOCTYPE html><html><head><title>Lake &amp; Land</title><script>var secret = 1;</script>
<style>p { color: red }</style></head><body><nav><a href="/">Home</a><a href="/x">Menu entry</a></nav>
<article><h1>Lake Titicaca</h1><p>Lake Titicaca is a large freshwater lake in the Andes on the border of Bolivia and
Peru.</p><p>It is often called the highest navigable lake in the world, with a surface elevation of 3,812 metres.</p>
<table><tr><td>Depth</td><td>281 m</td></tr></table></article><footer>Copyright</footer></body></html>"""


def test_a_page_gives_its_article_without_scripts_and_menus() -> None:
    found = document_text(ARTICLE.encode(), "text/html")
    assert found["title"] == "Lake & Land"
    assert "highest navigable lake" in found["text"] and "281 m" in found["text"]
    assert not any(word in found["text"] for word in ("secret", "color", "Menu entry"))


def test_html_is_told_by_its_content_where_no_type_is_given() -> None:
    assert document_text(b"<html><body><p>A short page, of one line.</p></body></html>")["text"] == (
        "A short page, of one line."
    )


def test_the_charset_of_the_server_is_used() -> None:
    page = "<html><body><p>Été à Genève, où l'on se baigne.</p></body></html>".encode("latin-1")
    assert "Été à Genève" in document_text(page, "text/html", "iso-8859-1")["text"]
    assert document_text("naïve".encode("utf-16"), "text/plain", "utf-16")["text"] == "naïve"
    assert document_text("naïve".encode(), "text/plain", "no-such-charset")["text"] == "naïve"


def test_a_pdf_gives_the_text_of_its_pages() -> None:
    found = document_text(pdf("The depth is 281 m.", "The end.", title="Lake"), "application/octet-stream")
    assert found == {"title": "Lake", "text": "The depth is 281 m.\n\nThe end."}


def test_plain_text_and_json_stay_as_they_are() -> None:
    assert document_text(b"\xef\xbb\xbfone  \ntwo\n", "text/plain")["text"] == "one\ntwo"
    assert document_text(b'{"a": 1}', "application/json")["text"] == '{"a": 1}'
    assert document_text(b"a < b", "application/ld+json")["text"] == "a < b"


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b"\x89PNG\r\n", "image/png", "it is image/png; only"),
        (b"PK\x03\x04\0\0\0\0", "", "binary data"),
        (b"%PDF-1.4\ngarbage", "", "the PDF cannot be read"),
        (pdf(""), "", "no text in it"),
        (b"  \n", "text/plain", "no text in it"),
        (b"<html><body><script>app()</script></body></html>", "text/html", "no text in it"),
    ],
)
def test_what_holds_no_text_says_why(body: bytes, kind: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        document_text(body, kind)


LAKES = [f"Lake number {number} is in the north and has many fish." for number in range(20)]


def test_the_passages_that_match_come_best_first_and_by_words_only() -> None:
    passages = [*LAKES, "The deepest point of the lake is 281 metres down.", "Depths vary."]
    assert best_passages(passages, "How deep is it? depth", 3) == [21]
    assert best_passages(passages, "deepest point", 1) == [20]
    assert best_passages(passages, 'fish" OR NEAR(x) *', 2) == [0, 1]
    assert best_passages(passages, "?!", 2) == []


def test_an_excerpt_keeps_the_order_of_the_text_and_marks_what_is_left_out() -> None:
    long = [f"{line} {'More of it follows here, all about nothing. ' * 12}" for line in LAKES]
    long[3] = "Here the depth is told. " + "It goes on about other things. " * 18
    long[15] = "The greatest depth is 281 metres. " + "It goes on about other things. " * 18
    text = "\n\n".join(long)
    found = excerpt(text, "greatest depth", 2, 1000)
    assert found.index("Here the depth is told.") < found.index("281 metres")
    assert found.startswith("[...]\n") and found.endswith("\n[...]") and found.count("[...]") == 3
    assert excerpt(text, "", 2, 1000) == excerpt(text, "zebra", 2, 1000)
    assert excerpt(text, "", 2, 1000).startswith(long[0][:500])
    assert "characters follow ...]" in excerpt(text, "", 2, 1000)
    assert excerpt("short", "depth", 2, 1000) == "short"


def test_paragraphs_hold_all_of_a_text() -> None:
    text = "Heading\n\nOne line.\nAnother line.\n- a point\n- a point more\n\n" + "A long sentence goes on. " * 80
    pieces = paragraphs(text, 300)
    assert " ".join(" ".join(pieces).split()) == " ".join(text.split())
    assert max(map(len, pieces)) <= 600 and pieces[0].startswith("Heading\nOne line.")


@pytest.mark.parametrize(
    "of",
    [
        lambda size: (paragraphs, "puffin word " * size),
        lambda size: (document_text, b"a" + b" " * (size // 4) + b"b"),
        lambda size: (document_text, b"<!---->" * min(size, 580) + b"puffins"),
    ],
)
def test_time_grows_with_the_length_of_a_text_without_line_ends(of: Callable[[int], Any]) -> None:
    def seconds(size: int) -> float:
        function, text = of(size)
        start = time.process_time()
        function(text)
        return time.process_time() - start

    assert seconds(800_000) < 30 * max(seconds(100_000), 0.005)  # squared it would be 64


def test_a_line_without_an_end_is_cut_into_pieces_that_hold_all_of_it() -> None:
    line = "".join(chr(97 + number % 26) for number in range(2101))
    assert list(split_passages(line)) == [line[:400], line[400:800], line[800:1200], line[1200:1600], line[1600:]]
