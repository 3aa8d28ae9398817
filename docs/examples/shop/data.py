"""The shop's catalogue and its shipping rates.

Every amount is a multiple of half a euro or half a kilogram: sums and products of such numbers are
exact in binary floating point, so that an answer is right or wrong and never off by 1e-15.
"""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    """`price` in euros for one; `stock` counts pieces in the warehouse; `weight` in kg, packed."""

    price: float
    stock: int
    weight: float


#: Items that training tasks are about.
TRAINING_ITEMS: dict[str, Item] = {
    "mug": Item(6.5, 34, 1.5),
    "lamp": Item(28.0, 17, 3.0),
    "clock": Item(19.5, 22, 1.5),
    "pen": Item(1.5, 240, 0.5),
    "chair": Item(45.0, 12, 6.5),
    "table": Item(120.0, 5, 24.0),
    "desk": Item(150.0, 7, 31.0),
    "book": Item(14.5, 63, 1.0),
    "plate": Item(5.0, 88, 2.0),
    "bowl": Item(7.5, 41, 1.0),
    "spoon": Item(2.5, 160, 0.5),
    "fork": Item(2.0, 155, 1.0),
    "pan": Item(24.5, 19, 2.0),
    "towel": Item(9.0, 54, 2.5),
    "pillow": Item(16.0, 38, 1.0),
    "blanket": Item(32.5, 26, 2.5),
    "mirror": Item(38.0, 9, 8.0),
    "candle": Item(3.5, 130, 1.5),
    "basket": Item(12.5, 31, 1.5),
    "bottle": Item(8.5, 72, 1.0),
    "hat": Item(15.5, 43, 1.0),
    "shirt": Item(22.0, 95, 1.5),
    "coat": Item(85.0, 14, 2.0),
    "belt": Item(18.5, 29, 2.0),
    "bag": Item(26.0, 36, 1.5),
    "ring": Item(64.0, 8, 0.5),
    "drum": Item(95.0, 6, 9.0),
    "ball": Item(4.5, 110, 1.0),
}

#: Items that only held-out tasks are about.
HELD_OUT_ITEMS: dict[str, Item] = {
    "kettle": Item(29.5, 18, 2.0),
    "cup": Item(4.0, 125, 1.0),
    "vase": Item(11.0, 47, 2.5),
    "pot": Item(21.5, 23, 3.5),
    "rug": Item(58.0, 11, 7.0),
    "jar": Item(3.0, 84, 1.0),
    "boot": Item(49.5, 27, 1.5),
    "wallet": Item(33.0, 39, 1.5),
    "bell": Item(10.5, 51, 1.0),
    "guitar": Item(180.0, 4, 4.5),
    "puzzle": Item(13.0, 66, 1.5),
    "doll": Item(17.5, 32, 2.5),
    "kite": Item(20.0, 21, 1.0),
    "tent": Item(115.0, 13, 5.5),
    "hammer": Item(23.5, 44, 2.0),
    "bucket": Item(5.5, 76, 1.5),
}

ITEMS: dict[str, Item] = {**TRAINING_ITEMS, **HELD_OUT_ITEMS}

#: What shipping one order costs, in euros, by zone.
ZONE_RATES: dict[str, float] = {"home": 3.5, "near": 6.0, "middle": 9.5, "far": 14.0}

#: Cities that training tasks ship to, and the zone each lies in.
TRAINING_CITIES: dict[str, str] = {
    "Berlin": "home",
    "Hamburg": "home",
    "Paris": "near",
    "Vienna": "near",
    "Brussels": "near",
    "Rome": "middle",
    "Madrid": "middle",
    "Dublin": "middle",
    "Oslo": "far",
    "Lisbon": "far",
}

#: Cities that only held-out tasks ship to.
HELD_OUT_CITIES: dict[str, str] = {
    "Munich": "home",
    "Prague": "near",
    "Zurich": "near",
    "Warsaw": "middle",
    "Athens": "far",
    "Helsinki": "far",
}

ZONES: dict[str, str] = {**TRAINING_CITIES, **HELD_OUT_CITIES}
