"""Texts of the generated word problems. `bench/gsm8k/generate.py` fills them in.

`{n}` in a question is a drawn number (from the first bound up to below the second). `{name = expression}` in a step
works something out; the last one is the answer. Every value is a whole number above zero: numbers are drawn until so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["TEMPLATES", "Template"]


@dataclass(frozen=True, slots=True)
class Template:
    question: str
    numbers: Mapping[str, tuple[int, int]]
    steps: tuple[str, ...]


TEMPLATES: Final = (
    Template(
        "A baker makes {a} trays of {b} rolls and sells {c} of the rolls. How many rolls are left?",
        {"a": (3, 16), "b": (6, 25), "c": (5, 90)},
        ("The baker makes {all = a * b} rolls.", "After the sale {left = all - c} rolls are left."),
    ),
    Template(
        "A librarian shelves {a} books on Monday and {b} times as many on Tuesday. How many books is that in two days?",
        {"a": (12, 95), "b": (2, 8)},
        ("On Tuesday it is {t = a * b} books.", "In two days it is {sum = a + t} books."),
    ),
    Template(
        "A farmer has {a} hens. Each lays {b} eggs a week. The farmer keeps {c} eggs and sells the rest in boxes of "
        "{d}. How many boxes does the farmer fill each week?",
        {"a": (8, 41), "b": (3, 8), "c": (2, 30), "d": (4, 13)},
        (
            "The hens lay {all = a * b} eggs.",
            "For sale there are {rest = all - c} eggs.",
            "They fill {boxes = rest / d} boxes.",
        ),
    ),
    Template(
        "A taxi ride costs ${a} plus ${b} for each kilometer. How many dollars does a ride of {c} kilometers cost?",
        {"a": (3, 13), "b": (2, 7), "c": (4, 60)},
        ("The way costs ${way = b * c}.", "With the fixed part it is ${total = a + way}."),
    ),
    Template(
        "A runner trains {a} minutes on each of {b} days of a week. How many hours is that in {c} weeks?",
        {"a": (20, 91), "b": (2, 7), "c": (2, 13)},
        (
            "A week has {week = a * b} minutes of training.",
            "All weeks have {all = week * c} minutes.",
            "That is {hours = all / 60} hours.",
        ),
    ),
    Template(
        "A painter needs {a} liters of paint for a wall. How many dollars does the paint for {b} such walls cost, if a "
        "can of {c} liters costs ${d}?",
        {"a": (2, 13), "b": (3, 17), "c": (2, 11), "d": (9, 60)},
        (
            "All walls take {liters = a * b} liters.",
            "That is {cans = liters / c} cans.",
            "They cost ${cost = cans * d}.",
        ),
    ),
    Template(
        "A school orders {a} boxes with {b} pencils each and shares them equally among {c} classes. How many pencils "
        "does each class get?",
        {"a": (4, 31), "b": (10, 61), "c": (3, 16)},
        ("There are {all = a * b} pencils.", "Each class gets {each = all / c} pencils."),
    ),
    Template(
        "A cinema sells {a} tickets at ${b} and {c} at ${d}. How many dollars does it take in?",
        {"a": (20, 150), "b": (5, 10), "c": (10, 120), "d": (10, 20)},
        (
            "The first kind brings ${one = a * b}.",
            "The second brings ${two = c * d}.",
            "Together it is ${sum = one + two}.",
        ),
    ),
    Template(
        "A gardener has {a} seeds. {b} of every {c} seeds sprout. How many seeds do not sprout?",
        {"a": (40, 400), "b": (2, 8), "c": (5, 11)},
        (
            "There are {groups = a / c} such groups of seeds.",
            "Of each {bad = c - b} do not sprout.",
            "In all {answer = groups * bad} do not sprout.",
        ),
    ),
    Template(
        "A train has {a} cars with {b} seats each. {c} seats are taken. How many seats are free?",
        {"a": (4, 15), "b": (40, 91), "c": (50, 700)},
        ("The train has {all = a * b} seats.", "Free are {free = all - c} seats."),
    ),
    Template(
        "A shop buys {a} shirts for ${b} each and sells all of them for ${c} each. How many dollars does it earn?",
        {"a": (10, 90), "b": (6, 20), "c": (20, 50)},
        ("On each shirt it earns ${each = c - b}.", "On all of them it earns ${all = a * each}."),
    ),
    Template(
        "A tank holds {a} liters. It is filled at {b} liters a minute, while {c} liters a minute leak out. After how "
        "many minutes is the empty tank full?",
        {"a": (200, 2000), "b": (20, 90), "c": (3, 20)},
        ("Each minute the tank gains {gain = b - c} liters.", "It is full after {time = a / gain} minutes."),
    ),
    Template(
        "A coat costs ${a} and is sold at {b}% off. How many dollars does the coat cost then?",
        {"a": (40, 600), "b": (5, 70)},
        ("The discount is ${off = a * b / 100}.", "The coat costs ${price = a - off}."),
    ),
    Template(
        "A worker earns ${a} an hour for {b} hours, and ${c} more than that for each of {d} extra hours. How many "
        "dollars is that in all?",
        {"a": (12, 45), "b": (20, 41), "c": (3, 15), "d": (2, 13)},
        (
            "The usual hours bring ${usual = a * b}.",
            "An extra hour brings ${rate = a + c}.",
            "The extra hours bring ${extra = rate * d}.",
            "In all it is ${sum = usual + extra}.",
        ),
    ),
    Template(
        "Three friends collect stamps. The first has {a}, the second has {b} more than the first, and the third has "
        "twice as many as the second. How many stamps do the three have together?",
        {"a": (10, 120), "b": (3, 60)},
        (
            "The second has {two = a + b} stamps.",
            "The third has {three = two * 2} stamps.",
            "Together they have {sum = a + two + three} stamps.",
        ),
    ),
    Template(
        "A rectangle is {a} meters long and {b} meters wide. A fence around it costs ${c} a meter. How many dollars "
        "does the fence cost?",
        {"a": (10, 90), "b": (5, 60), "c": (3, 25)},
        ("The way around is {way = 2 * (a + b)} meters.", "The fence costs ${cost = way * c}."),
    ),
    Template(
        "A floor of {a} by {b} meters is laid with tiles of which {c} cover a square meter. Tiles come in packs of "
        "{d}. How many packs are needed?",
        {"a": (3, 17), "b": (3, 15), "c": (4, 26), "d": (5, 31)},
        (
            "The floor has {area = a * b} square meters.",
            "It takes {tiles = area * c} tiles.",
            "That is {packs = tiles / d} packs.",
        ),
    ),
    Template(
        "A hiker walks {a} kilometers on the first day and {b} kilometers more on each following day than on the day "
        "before. How many kilometers does the hiker walk in three days?",
        {"a": (6, 30), "b": (2, 12)},
        (
            "On the second day it is {two = a + b} kilometers.",
            "On the third day it is {three = two + b} kilometers.",
            "In three days it is {sum = a + two + three} kilometers.",
        ),
    ),
    Template(
        "A printer prints {a} pages a minute. A second one prints {b} pages a minute. How many minutes do both "
        "together need for {c} copies of a booklet of {d} pages?",
        {"a": (10, 40), "b": (5, 35), "c": (10, 90), "d": (6, 49)},
        (
            "There are {pages = c * d} pages.",
            "Both print {speed = a + b} pages a minute.",
            "They need {time = pages / speed} minutes.",
        ),
    ),
    Template(
        "A jar has {a} marbles. One half of the marbles are red, {b} are blue, and the rest are green. How many are "
        "green?",
        {"a": (30, 300), "b": (5, 90)},
        (
            "There are {red = a / 2} red marbles.",
            "Red and blue are {both = red + b} marbles.",
            "Green are {green = a - both} marbles.",
        ),
    ),
    Template(
        "A family drives {a} kilometers. The car uses {b} liters of fuel for 100 kilometers, and a liter costs ${c}. "
        "How many dollars does the fuel cost?",
        {"a": (100, 1900), "b": (4, 13), "c": (2, 5)},
        ("The car uses {liters = a * b / 100} liters.", "They cost ${cost = liters * c}."),
    ),
    Template(
        "A club has {a} members, who pay ${b} a month. How many dollars does the club have left in a year, if it pays "
        "${c} of rent every month?",
        {"a": (15, 90), "b": (5, 30), "c": (50, 900)},
        (
            "Each month ${income = a * b} come in.",
            "After the rent ${left = income - c} are left.",
            "In a year that is ${year = left * 12}.",
        ),
    ),
    Template(
        "A cook needs {a} eggs for a cake and {b} eggs for a pie. How many eggs are needed for {c} cakes and {d} pies?",
        {"a": (2, 9), "b": (2, 7), "c": (3, 30), "d": (2, 25)},
        (
            "The cakes need {cakes = a * c} eggs.",
            "The pies need {pies = b * d} eggs.",
            "Together it is {sum = cakes + pies} eggs.",
        ),
    ),
    Template(
        "A bus leaves with {a} passengers. At each of {b} stops {c} get off and {d} get on. How many passengers does "
        "the bus have after these stops?",
        {"a": (30, 80), "b": (2, 6), "c": (3, 12), "d": (1, 9)},
        (
            "In all {off = b * c} get off.",
            "In all {on = b * d} get on.",
            "Then there are {then = a - off + on} passengers.",
        ),
    ),
    Template(
        "A saver puts ${a} aside each week. After {b} weeks the saver buys a lamp for ${c} and a chair for ${d}. How "
        "many dollars are left?",
        {"a": (10, 60), "b": (5, 30), "c": (15, 120), "d": (20, 200)},
        (
            "The saver has ${saved = a * b}.",
            "The things cost ${cost = c + d}.",
            "There are ${left = saved - cost} left.",
        ),
    ),
    Template(
        "A machine makes {a} screws an hour and runs {b} hours a day. {c} of every 100 screws are thrown away. How "
        "many good screws does it make a day?",
        {"a": (50, 900), "b": (4, 25), "c": (1, 12)},
        (
            "A day brings {all = a * b} screws.",
            "Thrown away are {bad = all * c / 100} screws.",
            "Good are {good = all - bad} screws.",
        ),
    ),
    Template(
        "A teacher is {a} years old, {b} years older than twice the age of a pupil. How old will the pupil be in {c} "
        "years?",
        {"a": (26, 66), "b": (2, 15), "c": (2, 20)},
        (
            "Twice the pupil's age is {twice = a - b}.",
            "The pupil is {now = twice / 2} years old.",
            "In the future it will be {then = now + c} years.",
        ),
    ),
    Template(
        "A rope of {a} meters is cut into two pieces. One piece is {b} meters longer than the other. How many meters "
        "long is the shorter piece?",
        {"a": (20, 300), "b": (2, 60)},
        ("Without the difference it is {same = a - b} meters.", "The shorter piece has {short = same / 2} meters."),
    ),
    Template(
        "A theater has {a} rows of {b} seats. On one evening all but {c} seats are sold at ${d}. How many dollars "
        "does the theater take in?",
        {"a": (8, 30), "b": (10, 36), "c": (4, 70), "d": (8, 40)},
        (
            "The theater has {all = a * b} seats.",
            "Sold are {sold = all - c} seats.",
            "They bring ${income = sold * d}.",
        ),
    ),
    Template(
        "A dog eats {a} grams of food in the morning and {b} grams in the evening. How many days does a bag of {c} "
        "kilograms last?",
        {"a": (50, 350), "b": (50, 350), "c": (2, 21)},
        (
            "A day takes {day = a + b} grams.",
            "The bag has {bag = c * 1000} grams.",
            "It lasts {days = bag / day} days.",
        ),
    ),
    Template(
        "A plumber works {a} hours in one house and {b} hours in another at ${c} an hour. Material costs ${d} in each "
        "house. How many dollars do both houses pay together?",
        {"a": (2, 12), "b": (2, 12), "c": (30, 95), "d": (20, 200)},
        (
            "The plumber works {hours = a + b} hours.",
            "They cost ${work = hours * c}.",
            "Material costs ${material = 2 * d}.",
            "Together it is ${sum = work + material}.",
        ),
    ),
    Template(
        "A parking lot has {a} cars and {b} motorcycles. How many wheels do they have together, if {c} of the cars "
        "also carry one spare wheel?",
        {"a": (15, 120), "b": (3, 60), "c": (2, 15)},
        (
            "The cars have {cars = a * 4} wheels.",
            "The motorcycles have {cycles = b * 2} wheels.",
            "With the spare ones it is {sum = cars + cycles + c} wheels.",
        ),
    ),
    Template(
        "A bookseller has {a} books. {b}% of them are novels, and one third of the novels are new. How many novels "
        "are not new?",
        {"a": (60, 900), "b": (10, 90)},
        (
            "There are {novels = a * b / 100} novels.",
            "New are {new = novels / 3} of them.",
            "Not new are {old = novels - new}.",
        ),
    ),
    Template(
        "Two trains leave one station in opposite directions, at {a} and at {b} kilometers an hour. How many "
        "kilometers apart are they after {c} hours?",
        {"a": (40, 150), "b": (40, 150), "c": (2, 9)},
        ("Each hour they part by {speed = a + b} kilometers.", "Apart they are {way = speed * c} kilometers."),
    ),
    Template(
        "A group of {a} people shares a bill of ${b} equally and adds a tip of ${c} for each person. How many dollars "
        "does each person pay?",
        {"a": (3, 13), "b": (36, 500), "c": (2, 12)},
        ("Of the bill each pays ${share = b / a}.", "With the tip it is ${total = share + c}."),
    ),
    Template(
        "A carpenter makes {a} tables with {b} legs each and {c} stools with {d} legs each from a stock of legs. {e} "
        "legs are left over. How many legs were in the stock?",
        {"a": (3, 30), "b": (3, 7), "c": (3, 40), "d": (3, 6), "e": (2, 40)},
        (
            "The tables take {tables = a * b} legs.",
            "The stools take {stools = c * d} legs.",
            "The stock had {all = tables + stools + e} legs.",
        ),
    ),
)
