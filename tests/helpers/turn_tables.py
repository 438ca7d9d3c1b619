"""What an evaluation says by turn."""

from itertools import groupby


def by_turn(values: list, turns: list) -> list[list]:
    "A column of the tokens table, cut into turns."
    return [[value for value, _ in part] for _, part in groupby(zip(values, turns), key=lambda pair: pair[1])]
