"""The tools that an agent of the shop gets; arithmetic it writes in Python.

They keep no state: the same call gives the same answer.
"""

from __future__ import annotations

from smolagents import Tool, tool

from .data import ITEMS, ZONE_RATES, ZONES, Item


def _item(name: str) -> Item:
    if name not in ITEMS:
        raise ValueError(f"the shop has no item {name!r}; names are singular, like 'mug'")
    return ITEMS[name]


@tool
def price(item: str) -> float:
    """Price of one item in euros.

    Args:
        item: Name of the item, singular.
    """
    return _item(item).price


@tool
def stock(item: str) -> int:
    """How many of an item are in stock.

    Args:
        item: Name of the item, singular.
    """
    return _item(item).stock


@tool
def weight(item: str) -> float:
    """Weight of one item in kilograms.

    Args:
        item: Name of the item, singular.
    """
    return _item(item).weight


@tool
def shipping(city: str) -> float:
    """Cost in euros of shipping one order to a city.

    Args:
        city: Name of the city.
    """
    if city not in ZONES:
        raise ValueError(f"the shop does not ship to {city!r}")
    return ZONE_RATES[ZONES[city]]


TOOLS: dict[str, Tool] = {each.name: each for each in (price, stock, weight, shipping)}
