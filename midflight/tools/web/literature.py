"""`search_literature`: papers from Europe PMC, arXiv and OpenAlex, none of which needs a key.

APIs: europepmc.org/RestfulWebService, info.arxiv.org/help/api, docs.openalex.org.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args
from xml.etree import ElementTree

from pydantic import Field, model_validator

from midflight.tools.base import InfrastructureError, Tool, ToolError, TransientError
from midflight.tools.function import tool
from midflight.tools.options import ToolContext
from midflight.tools.reading.passages import best_passages, split_passages
from midflight.tools.text import without_tags
from midflight.tools.web.http import Answer, ServiceUrl, Web, WebOptions, check_service, json_of

_ATOM = "{http://www.w3.org/2005/Atom}"
Source = Literal["europepmc", "arxiv", "openalex"]


class LiteratureOptions(WebOptions):
    sources: tuple[Source, ...] = Field(default=("europepmc", "arxiv", "openalex"), min_length=1)
    """Where to search, all at once."""
    results: int = Field(default=3, ge=1, le=25)
    """Most papers of each source."""
    calls_per_minute: float | None = Field(default=20.0, gt=0, le=1e12)
    """arXiv asks for three seconds between requests."""
    europepmc_url: ServiceUrl = "https://www.ebi.ac.uk/europepmc/webservices/rest/search"
    """Of Europe PMC."""
    arxiv_url: ServiceUrl = "https://export.arxiv.org/api/query"
    """Of arXiv."""
    openalex_url: ServiceUrl = "https://api.openalex.org/works"
    """Of OpenAlex."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for source in get_args(Source):
            if source not in self.sources and f"{source}_url" in self.model_fields_set:
                raise ValueError(f"{source}_url does nothing without {source} in sources; leave it out")
        return self


@dataclass(frozen=True)
class Paper:
    """One result; what a source does not say is empty."""

    title: str
    authors: str
    year: str
    venue: str
    link: str
    abstract: str

    def text(self, number: int, query: str) -> str:
        head = f"{number}. {self.title}{f' ({self.year})' if self.year else ''}"
        about = "; ".join(part for part in (self.authors, self.venue, self.link) if part)
        passages = list(split_passages(self.abstract))
        best = best_passages(passages, query, 1)
        quoted = passages[best[0]] if best else "".join(passages[:1])
        return "\n   ".join(line for line in (head, about, quoted) if line)


def search_literature(options: LiteratureOptions, context: ToolContext) -> Tool:
    """The tool within its options."""

    async def search_literature(
        query: Annotated[str, Field(min_length=1, max_length=300, description="words of a title or abstract")],
    ) -> str:
        """scientific papers that match: title, authors, year, link, and what the abstract says"""
        asked = [_SEARCHES[source](options, query.strip()) for source in options.sources]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        papers: list[Paper] = []
        failed: list[InfrastructureError | ToolError] = []
        for answer in answers:
            if isinstance(answer, InfrastructureError | ToolError):
                failed.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                papers += answer
        if len(failed) == len(answers):
            raise next((error for error in failed if isinstance(error, InfrastructureError)), failed[0])
        lines = [paper.text(number, query) for number, paper in enumerate(_each_once(papers), 1)]
        told = [f"(no answer from {error})" for error in failed]
        text = "\n".join([*(lines or [f"no paper matches {query.strip()!r}; try fewer or other words"]), *told])
        for error in failed:
            if isinstance(error, TransientError):
                so_far = text if lines else None
                raise TransientError(text, retry_after=error.retry_after, infrastructure=False, so_far=so_far)
        if not lines:
            raise ToolError(text)
        return text

    return tool(search_literature)


async def _europepmc(options: LiteratureOptions, query: str) -> list[Paper]:
    params: dict[str, str | int] = {"query": query, "format": "json", "resultType": "core", "pageSize": options.results}
    found = await _json("Europe PMC", options, options.europepmc_url, params)
    return [
        Paper(
            title=_plain(entry.get("title")).rstrip("."),
            authors=_few(str(entry.get("authorString") or "").rstrip(".").split(", ")),
            year=str(entry.get("pubYear") or ""),
            venue=_plain(_at(entry, "journalInfo", "journal", "title")),
            link=_doi(entry.get("doi")) or f"https://europepmc.org/article/{entry.get('source')}/{entry.get('id')}",
            abstract=_plain(entry.get("abstractText")),
        )
        for entry in _list(found, "Europe PMC", "resultList", "result")
    ]


async def _arxiv(options: LiteratureOptions, query: str) -> list[Paper]:
    words = " AND ".join(f"all:{word}" for word in re.findall(r"[\w-]+", query)) or "all:none"
    params: dict[str, str | int] = {"search_query": words, "max_results": options.results}
    answer = await _get("arXiv", options, options.arxiv_url, params)
    if b"<!DOCTYPE" in answer.body or b"<!ENTITY" in answer.body:
        raise TransientError("arXiv: the answer is not Atom")
    try:
        feed = ElementTree.fromstring(answer.body)
    except ElementTree.ParseError as error:
        raise TransientError(f"arXiv: the answer is not XML ({error})") from error
    if feed.tag != f"{_ATOM}feed":
        raise TransientError("arXiv: the answer is not Atom")

    def of(entry: ElementTree.Element, name: str) -> str:
        return _plain(entry.findtext(f"{_ATOM}{name}"))

    return [
        Paper(
            title=of(entry, "title"),
            authors=_few([_plain(author.findtext(f"{_ATOM}name")) for author in entry.findall(f"{_ATOM}author")]),
            year=of(entry, "published")[:4],
            venue="arXiv",
            link=of(entry, "id").replace("http://", "https://", 1),
            abstract=of(entry, "summary"),
        )
        for entry in feed.findall(f"{_ATOM}entry")
    ]


async def _openalex(options: LiteratureOptions, query: str) -> list[Paper]:
    params: dict[str, str | int] = {"search": query, "per-page": options.results}
    found = await _json("OpenAlex", options, options.openalex_url, params)
    return [
        Paper(
            title=_plain(entry.get("display_name")),
            authors=_few([_plain(_at(one, "author", "display_name")) for one in _items(entry.get("authorships"))]),
            year=str(entry.get("publication_year") or ""),
            venue=_plain(_at(entry, "primary_location", "source", "display_name")),
            link=_doi(entry.get("doi")) or str(entry.get("id") or ""),
            abstract=_uninverted(entry.get("abstract_inverted_index")),
        )
        for entry in _list(found, "OpenAlex", "results")
    ]


_SEARCHES = {"europepmc": _europepmc, "arxiv": _arxiv, "openalex": _openalex}


async def _get(service: str, options: LiteratureOptions, url: str, params: dict[str, str | int]) -> Answer:
    answer = await Web(options, service).get(url, params=params)
    check_service(answer, service)
    return answer


async def _json(service: str, options: LiteratureOptions, url: str, params: dict[str, str | int]) -> dict[str, Any]:
    return json_of(await _get(service, options, url, params), service)


def _list(found: Mapping[str, Any], service: str, *path: str) -> list[Mapping[str, Any]]:
    here = _at(found, *path)
    if not isinstance(here, list) or not all(isinstance(entry, Mapping) for entry in here):
        raise TransientError(f"{service}: the answer has no list {'.'.join(path)}")
    return here


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _each_once(papers: list[Paper]) -> list[Paper]:
    """The first of those with one title."""
    kept: dict[str, Paper] = {}
    for paper in papers:
        kept.setdefault(re.sub(r"\W+", "", paper.title.casefold()), paper)
    return list(kept.values())


def _few(authors: list[str]) -> str:
    return ", ".join(authors[:3]) + (" and others" if len(authors) > 3 else "")


def _doi(value: object) -> str:
    text = str(value or "")
    return text if text.startswith("https://") or not text else f"https://doi.org/{text}"


def _plain(value: object) -> str:
    without_inline = re.sub(r"</?(?:i|b|u|em|strong|sub|sup)>", "", str(value or ""), flags=re.IGNORECASE)
    return " ".join(without_tags(without_inline, " ").split())


def _uninverted(index: object) -> str:
    """An abstract from OpenAlex' index of the places of its words."""
    if not isinstance(index, Mapping):
        return ""
    places = ((place, str(word)) for word, places in index.items() for place in _items(places))
    placed = [(place, word) for place, word in places if isinstance(place, int)]
    return " ".join(word for _, word in sorted(placed))
