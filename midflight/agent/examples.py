"""Worked examples for the planner's prompt, all of them or those nearest to the question (KATE, arXiv 2101.06804)."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import lru_cache

__all__ = ["Examples", "worked_examples"]

_FIRST_LINE = re.compile(r"Question: *(.*)")


class Examples:
    """Blocks of text that each start with a line `Question: ...`, parted by empty lines.

    Nearness is the cosine of TF-IDF vectors over words and signs, numbers being one word.
    """

    def __init__(self, text: str) -> None:
        self.blocks = [block.strip("\n") + "\n" for block in re.split(r"\n\s*\n(?=Question:)", text) if block.strip()]
        self.questions = [_question(block) for block in self.blocks]
        bags = [_bag(question) for question in self.questions]
        seen = Counter(word for bag in bags for word in bag)
        self._weight = {word: math.log(1 + len(bags) / count) for word, count in seen.items()}
        self._vectors = [self._vector(bag) for bag in bags]

    def nearest(self, question: str, count: int) -> str:
        """The `count` examples nearest to `question`, the nearest last; the earlier in the file wins a tie."""
        vector = self._vector(_bag(question))
        nearness = [sum(value * other.get(word, 0.0) for word, value in vector.items()) for other in self._vectors]
        order = sorted(range(len(self.blocks)), key=lambda index: -nearness[index])
        return "\n".join(self.blocks[index] for index in reversed(order[:count]))

    def _vector(self, bag: Counter[str]) -> dict[str, float]:
        values = {word: (1 + math.log(count)) * self._weight.get(word, 0.0) for word, count in bag.items()}
        length = math.sqrt(sum(value * value for value in values.values())) or 1.0
        return {word: value / length for word, value in values.items()}


@lru_cache(maxsize=16)
def worked_examples(text: str) -> Examples:
    """`Examples(text)`, made once."""
    return Examples(text)


def _question(block: str) -> str:
    first = _FIRST_LINE.match(block)
    return first[1] if first else block.split("\n", 1)[0]


def _bag(text: str) -> Counter[str]:
    return Counter(re.findall(r"[^\W\d_]+|0|[^\w\s]", re.sub(r"[0-9]+", "0", text.lower())))
