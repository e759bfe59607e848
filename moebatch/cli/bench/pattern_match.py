"""HELM's synthetic reasoning, task pattern_match, made anew from its description.

An item is a pattern of rule letters and signs, and a text in which each letter stands replaced by one
or two words; of four patterns the one that gives the text is to be found. A prompt has five solved
examples before the open item.
"""

import random
from collections import defaultdict
from dataclasses import dataclass

_ANIMALS = ("zebra", "cobra", "stork", "penguin", "shark", "lion", "buffalo", "whale", "seal",
            "eagle", "horse", "rat")  # fmt: skip
_FRUITS = ("apple", "peach", "watermelon", "banana", "grape", "kiwi", "pear", "strawberry",
           "blueberry", "blackberry")  # fmt: skip
_WORDS = _ANIMALS + _FRUITS
_LETTERS, _SIGNS = "XYZ", "-+*="
_SHOTS, _DECOYS, _TRAINING_ITEMS = 5, 3, 1000
_EXAMPLES_SEED = 1  # of the first ten, one whose prompts have the paper's mean length
_TASK = "Please solve the following problem."


@dataclass(frozen=True, slots=True)
class Item:
    """One problem: what is asked and the pattern that is right."""

    question: str
    target: str


def make_item(rng: random.Random) -> Item:
    """One item of pattern_match."""
    letters = rng.choices(_LETTERS, k=rng.choice((2, 3)))
    signs = rng.choices(_SIGNS, k=rng.choice((2, 3)))
    pattern = _shuffled(rng, letters + signs)
    replaced = {
        letter: " ".join(rng.choices(_WORDS, k=rng.choice((1, 2))))
        for letter in sorted(set(letters))
    }
    result = " ".join(replaced.get(symbol, symbol) for symbol in pattern)
    distinct = sorted(set(letters))
    rules = [_shuffled(rng, signs + distinct) for _ in range(_DECOYS)] + [pattern]
    rng.shuffle(rules)
    shown = " | ".join(" ".join(rule) for rule in rules)
    return Item(question=f"Rules: {shown} | Result: {result}", target=" ".join(pattern))


def make_prompts(count: int, *, seed: int = 0) -> list[str]:
    """So many prompts; the five examples are the same in all of them."""
    rng = random.Random(_EXAMPLES_SEED)
    examples = _examples(rng, [make_item(rng) for _ in range(_TRAINING_ITEMS)])
    rng = random.Random(f"items {seed}")
    solved = [f"{item.question}\nTarget: {item.target}" for item in examples]
    return [
        "\n\n".join([_TASK, *solved, f"{make_item(rng).question}\nTarget:"]) for _ in range(count)
    ]


def _examples(rng: random.Random, items: list[Item]) -> list[Item]:
    """One item for each of the commonest answers, ties in random order."""
    by_answer: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_answer[item.target].append(item)
    groups = list(by_answer.values())
    rng.shuffle(groups)
    groups.sort(key=len, reverse=True)
    return [rng.choice(group) for group in groups[:_SHOTS]]


def _shuffled(rng: random.Random, symbols: list[str]) -> list[str]:
    return rng.sample(symbols, k=len(symbols))
