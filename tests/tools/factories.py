"""Tools that hold something: settings or data that their code does not say."""

from __future__ import annotations

import functools

from midflight.tools import ToolResult, tool


def lookup_in(table):
    @tool
    def lookup(text: str) -> str:
        "looks up"
        return table[text]

    return lookup


def lookup_by_default(table):
    @tool
    def lookup(text: str, other: dict[str, str] = table) -> str:
        "looks up"
        return other[text]

    return lookup


def lookup_through(table):
    def loud(function):
        @functools.wraps(function)
        def inner(text):
            return function(text) if text else inner("a")

        return inner

    @tool
    @loud
    def lookup(text: str) -> str:
        "looks up"
        return table[text]

    return lookup


class Lookup:
    __slots__ = ("__dict__",)
    name, description, parameters = "lookup", "looks up", {"type": "object"}

    def __init__(self, table):
        self.table = table

    async def call(self, arguments, seconds):
        return ToolResult(self.table[arguments["text"]])

    def lookup(self, text: str) -> str:
        "looks up"
        return self.table[text]


class Slotted(Lookup):
    __slots__ = ("__hidden",)

    def __init__(self, table):
        self.__hidden = table

    @property
    def table(self):
        return self.__hidden


def lookup_of(table):
    return tool(Lookup(table).lookup)


def either(table):
    if table["a"] == "old":

        @tool
        def lookup(text: str) -> str:
            "looks up"
            return "old"

    else:

        @tool
        def lookup(text: str) -> str:
            "looks up"
            return "new"

    return lookup


class Told(Lookup):
    def __init__(self, table):
        self.table, self.cache_state = dict(table, client=object()), table["a"]


class Client(Lookup):
    def __init__(self, table):
        self.client = object()


def lookup_with(client):
    @tool
    def lookup(text: str) -> str:
        "looks up"
        return str(client)

    return lookup
