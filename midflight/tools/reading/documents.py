"""Documents to clean text: HTML, PDF, plain text and Markdown. Runs in a worker process, since input may be hostile.

Invariant: the kind is told by content, then by type or name; what holds no text is an error, never an empty text.
"""

from __future__ import annotations

import html
import io
import re

from midflight.tools.base import ToolError

MOST_PAGES = 300
"""Of a PDF."""
_HTML = re.compile(
    rb"^\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/javascript")


def document_text(body: bytes, content_type: str = "", charset: str | None = None) -> dict[str, str]:
    """`title` (may be empty) and `text` of a document.

    Args:
        content_type: as a server gives it, such as `text/html`; empty when not known.
        charset: of text, as a server gives it; None takes UTF-8, or what a page says of itself.

    Raises:
        ToolError: not a kind that can be read, or no text in it.
    """
    if body.lstrip()[:5] == b"%PDF-" or content_type == "application/pdf":
        title, text = _pdf(body)
    elif _HTML.match(body[:4096]) or content_type in _HTML_TYPES:
        title, text = _html(body, charset)
    elif not content_type or content_type.startswith("text/") or _is_textual(content_type):
        title, text = "", _decoded(body, charset)
        if "\0" in text[:4096]:
            raise ToolError("it is binary data, not text")
    else:
        raise ToolError(f"it is {content_type}; only HTML, PDF and plain text can be read")
    text = re.sub(r"(?<![ \t\r\f\v])[ \t\r\f\v]+\n", "\n", text).strip()
    if not text:
        raise ToolError("there is no text in it; it may be made by scripts, or be scanned")
    return {"title": _whole(" ".join(title.split())), "text": _whole(text)}


def _whole(text: str) -> str:
    """`text` without halves of characters, which a PDF may hold and nothing can keep or send."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _is_textual(content_type: str) -> bool:
    return content_type in _TEXT_TYPES or content_type.endswith(("+json", "+xml"))


def _decoded(body: bytes, charset: str | None) -> str:
    try:
        return body.decode(charset or "utf-8-sig", "replace")
    except (LookupError, UnicodeError):  # a server may name a charset that does not exist, or is none of texts
        return body.decode("utf-8-sig", "replace")


def _html(body: bytes, charset: str | None) -> tuple[str, str]:
    import trafilatura

    source: str | bytes = _decoded(body, charset) if charset else body
    text = trafilatura.extract(source, favor_recall=True, include_comments=False, output_format="txt")
    if not text:  # what has no article in it: lists, tables, front pages
        text = trafilatura.html2txt(source)
    if not text and not _HTML.match(body[:4096]):  # a part of a page: what stands outside of a body is passed over
        text = trafilatura.html2txt(f"<html><body>{_decoded(body, charset)}</body></html>")
    _, opened, rest = _parted(r"<title[^>]*>", _decoded(body[:65536], charset))
    title, closed, _ = _parted(r"</title>", rest)
    return html.unescape(title) if opened and closed else "", text or ""


def _parted(pattern: str, text: str) -> tuple[str, str, str]:
    """As `str.partition`."""
    found = re.search(pattern, text, re.I)
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")


def _pdf(body: bytes) -> tuple[str, str]:
    import logging

    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = PdfReader(io.BytesIO(body))
        if reader.is_encrypted and not reader.decrypt(""):
            raise ToolError("the PDF is encrypted")
        pages = [page.extract_text() for page in reader.pages[:MOST_PAGES]]
        title = str((reader.metadata.title if reader.metadata else None) or "")
    except PyPdfError as error:
        raise ToolError(f"the PDF cannot be read ({error})") from error
    return title, "\n\n".join(page for page in pages if page)
