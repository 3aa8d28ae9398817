"""The kinds of tasks: for each, the Python that answers it and the ways to ask for it.

Blanks are `item`, `item2`, `item3`, `city`, `city2` and the numbers `n` and `m`. In `code` they
stand for Python literals. In a phrasing `{item}` is the bare name, `{a_item}` the name with its
article and `{items}` its plural (`{items2}` that of the second).

The warm start shows one call, alone or in arithmetic with a number. That calls can be put together
is for GRPO to find: sampled at temperature 1, the model does so in about one attempt of ten.
"""

from __future__ import annotations

from string import Formatter
from typing import NamedTuple


class Shape(NamedTuple):
    """A kind of task."""

    name: str
    code: str
    phrasings: tuple[str, ...]

    @property
    def blanks(self) -> tuple[str, ...]:
        """The blanks of the code, in order of first use."""
        names = (name for _, name, _, _ in Formatter().parse(self.code) if name)
        return tuple(dict.fromkeys(names))


ONE_CALL = (
    Shape(
        "price",
        "price({item})",
        (
            "What does {a_item} cost?",
            "How much is {a_item}?",
            "What is the price of {a_item}?",
            "Tell me the price of one {item}.",
        ),
    ),
    Shape(
        "several",
        "price({item}) * {n}",
        (
            "What do {n} {items} cost?",
            "How much are {n} {items}?",
            "I buy {n} {items}. What do I pay?",
        ),
    ),
    Shape(
        "stock",
        "stock({item})",
        (
            "How many {items} are in stock?",
            "How many {items} do you have?",
            "What is the stock of {items}?",
        ),
    ),
    Shape(
        "delivery",
        "stock({item}) + {n}",
        (
            "How many {items} are in stock after {n} more arrive?",
            "We get {n} more {items}. How many do we have then?",
        ),
    ),
    Shape(
        "shipping",
        "shipping({city})",
        (
            "What does shipping to {city} cost?",
            "How much is shipping to {city}?",
            "I live in {city}. What do I pay for shipping?",
        ),
    ),
    Shape(
        "gift",
        "price({item}) + {n}",
        (
            "What does {a_item} cost with gift wrap for {n} euros?",
            "I buy {a_item} and a card for {n} euros. What do I pay?",
        ),
    ),
    Shape(
        "weight",
        "weight({item})",
        (
            "What does {a_item} weigh?",
            "How heavy is {a_item}?",
            "What is the weight of {a_item}?",
        ),
    ),
    Shape(
        "load",
        "weight({item}) * {n}",
        ("What do {n} {items} weigh?", "How heavy are {n} {items}?"),
    ),
)

TWO_CALLS = (
    Shape(
        "pair",
        "price({item}) + price({item2})",
        (
            "What do {a_item} and {a_item2} cost together?",
            "What is the total price of {a_item} and {a_item2}?",
            "I buy {a_item} and {a_item2}. What do I pay?",
        ),
    ),
    Shape(
        "pair_stock",
        "stock({item}) + stock({item2})",
        (
            "How many {items} and {items2} are in stock together?",
            "What is the total stock of {items} and {items2}?",
        ),
    ),
    Shape(
        "pair_weight",
        "weight({item}) + weight({item2})",
        (
            "What do {a_item} and {a_item2} weigh together?",
            "What is the total weight of {a_item} and {a_item2}?",
        ),
    ),
    Shape(
        "shipped",
        "price({item}) + shipping({city})",
        (
            "What does {a_item} cost with shipping to {city}?",
            "How much is {a_item} shipped to {city}?",
        ),
    ),
    Shape(
        "several_shipped",
        "price({item}) * {n} + shipping({city})",
        (
            "What do {n} {items} cost with shipping to {city}?",
            "How much are {n} {items} shipped to {city}?",
        ),
    ),
)

THREE_CALLS = (
    Shape(
        "trio",
        "price({item}) + price({item2}) + price({item3})",
        (
            "What do {a_item}, {a_item2} and {a_item3} cost together?",
            "I buy {a_item}, {a_item2} and {a_item3}. What do I pay?",
        ),
    ),
    Shape(
        "trio_weight",
        "weight({item}) + weight({item2}) + weight({item3})",
        (
            "What do {a_item}, {a_item2} and {a_item3} weigh together?",
            "What is the total weight of {a_item}, {a_item2} and {a_item3}?",
        ),
    ),
    Shape(
        "pair_shipped",
        "price({item}) + price({item2}) + shipping({city})",
        (
            "What do {a_item} and {a_item2} cost with shipping to {city}?",
            "How much are {a_item} and {a_item2} shipped to {city}?",
        ),
    ),
)

#: Chains of two and three calls, and phrasings, that no training task has.
NOVEL = (
    Shape(
        "worth",
        "price({item}) * stock({item})",
        (
            "What are all the {items} in stock worth?",
            "If every {item} in stock is sold, how much money comes in?",
        ),
    ),
    Shape(
        "shelf_load",
        "weight({item}) * stock({item})",
        (
            "The shelf holds every {item} in stock. What is its load in kilograms?",
            "How heavy is the whole stock of {items}?",
        ),
    ),
    Shape(
        "two_cities",
        "shipping({city}) + shipping({city2})",
        (
            "One parcel goes to {city} and one to {city2}. What is the shipping in all?",
            "What is the combined shipping to {city} and {city2}?",
        ),
    ),
    Shape(
        "two_kinds",
        "price({item}) * {n} + price({item2}) * {m}",
        (
            "I want {n} {items} and {m} {items2}: what is the bill?",
            "My order is {n} {items} plus {m} {items2}. Find its total.",
        ),
    ),
    Shape(
        "trio_stock",
        "stock({item}) + stock({item2}) + stock({item3})",
        (
            "Count the {items}, {items2} and {items3} in the warehouse.",
            "If we add up {items}, {items2} and {items3}, how many pieces are in stock?",
        ),
    ),
    Shape(
        "mixed_order",
        "price({item}) * {n} + price({item2}) + shipping({city})",
        (
            "I want {n} {items} and {a_item2} sent to {city}: what do I pay in all?",
            "An order of {n} {items} and {a_item2} goes to {city}. Find its total.",
        ),
    ),
)
