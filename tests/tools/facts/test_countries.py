"""Country tools on the real data."""

import asyncio
import re

import pytest

from midflight.tools import BUILTIN, ErrorKind, FunctionTool, ToolResult
from midflight.tools.facts import countries as tools
from midflight.tools.facts.world import ALIASES, CAPITAL_ALIASES, WITH_ARTICLE, countries, find_by_capital, find_country


def call(one: FunctionTool, text: str) -> ToolResult:
    return asyncio.run(one.call({next(iter(one.parameters["properties"])): text}, 5.0))


@pytest.mark.parametrize(
    ("one", "argument", "text"),
    [
        (tools.capital, "Peru", "Lima"),
        (tools.capital, "kazakhstan", "Astana"),
        (tools.population, "Peru", "31989256"),
        (tools.area, " peru ", "1285220"),
        (tools.country_of_capital, "lima", "Peru"),
        (tools.country_of_capital, "Bogotá", "Colombia"),
        (tools.country_of_capital, "Kingston", "Jamaica, Norfolk Island"),
        (tools.borders, "Portugal", "Spain"),
        (tools.borders, "Iceland", "none"),
        (tools.currency, "Peru", "Sol (PEN)"),
        (tools.continent, "Peru", "South America"),
    ],
)
def test_known_values(one: FunctionTool, argument: str, text: str) -> None:
    assert call(one, argument) == ToolResult(text)


def test_languages_come_from_the_factbook() -> None:
    text = call(tools.languages, "Peru").text
    assert text.startswith("Spanish (official) 82.9%, Quechua (official) 13.6%")
    assert call(tools.languages, "Guadeloupe").error is ErrorKind.TOOL_ERROR
    for country in countries().values():
        result = call(tools.languages, country.name)
        assert not re.search(r"</?[a-z]|&[a-z#]+;", result.text)


@pytest.mark.parametrize(
    ("name", "iso"),
    [
        ("USA", "US"),
        ("the united states of america", "US"),
        ("The Netherlands", "NL"),
        ("Holland", "NL"),
        ("Côte d’Ivoire", "CI"),
        ("DR Congo", "CD"),
        ("St. Lucia", "LC"),
        ("Türkiye", "TR"),
        ("Trinidad & Tobago", "TT"),
        ("PER", "PE"),
        ("  czech   republic", "CZ"),
    ],
)
def test_spellings_of_one_country(name: str, iso: str) -> None:
    assert find_country(name).iso == iso


def test_every_name_alias_and_capital_finds_its_country() -> None:
    for country in countries().values():
        assert find_country(country.name) == country
        assert find_country(country.phrase) == country
        assert not country.capital or country in find_by_capital(country.capital)
    for iso, names in ALIASES.items():
        assert all(find_country(name).iso == iso for name in names)
    assert {*ALIASES, *CAPITAL_ALIASES, *WITH_ARTICLE} <= set(countries())


def test_unknown_names_are_tool_errors() -> None:
    assert call(tools.population, "Perú do Sul") == ToolResult("no country named 'Perú do Sul'", ErrorKind.TOOL_ERROR)
    near = call(tools.population, "Nigerr")
    assert near == ToolResult("no country named 'Nigerr'; close: Niger, Nigeria", ErrorKind.TOOL_ERROR)
    assert call(tools.capital, "Antarctica").error is ErrorKind.TOOL_ERROR
    assert call(tools.country_of_capital, "Springfield").error is ErrorKind.TOOL_ERROR
    assert call(tools.capital, "").error is ErrorKind.INVALID_ARGUMENTS
    assert call(tools.capital, "x" * 61).error is ErrorKind.INVALID_ARGUMENTS


def test_dissolved_countries_are_gone_and_tools_run_inline() -> None:
    assert not {"CS", "AN"} & set(countries())
    assert len(countries()) == 250
    assert not any(getattr(tools, name).blocking for name in BUILTIN if hasattr(tools, name))
