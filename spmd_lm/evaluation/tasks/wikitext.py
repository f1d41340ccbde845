"""`wikitext`: perplexity per original word of WikiText, whose files separate every token by a space.

The convention of published figures (Megatron-LM's, arXiv:1909.08053, appendix E): the text is stripped, detokenized,
tokenized, and scored in windows that move by 32 tokens; the total loss is divided by the number of original words,
separated by single spaces.  WikiText-103's test text has 245,566 of these, and 270,329 tokens of GPT-2."""

import re
from typing import ClassVar

import numpy as np

from spmd_lm.evaluation.bootstrap import Metric
from spmd_lm.evaluation.tasks.perplexity import TextTask

QUOTES = {
    # Spaces inside a pair of marks are removed.  In this order: a bracket may span quotes.
    r"\(\s*([^)]*?)\s*\)": r"(\1)",
    r"\[\s*([^]]*?)\s*\]": r"[\1]",
    r"{\s*([^}]*?)\s*}": r"{\1}",
    r'"\s*([^"]*?)\s*"': r'"\1"',
    r"'\s*([^']*?)\s*'": r"'\1'",
}


def detokenize(text: str) -> str:
    """WikiText as people write it: Megatron-LM's rules, in its order, which matters where they overlap."""
    text = text.replace("s '", "s'")  # possessives
    for mark in "-,.":  # inside of numbers and compounds
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for pattern, replacement in QUOTES.items():
        text = re.sub(pattern, replacement, text)
    for level in (4, 3, 2):  # of headings: = = = Title = = =
        text = text.replace(" ".join("=" * level), "=" * level)
    text = text.replace(" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}").replace(" \n", "\n").replace("\n ", "\n")
    return text.replace(" N ", " 1 ").replace(" 's", "'s")


def count_words(text: str) -> int:
    """Words separated by single spaces; a line's end is a word, as it is a token of WikiText."""
    return len(text.strip().split(" "))


class WikiTextTask(TextTask):
    """`wikitext=PATH`: `text` of the detokenized text; also word_perplexity, per original word."""

    name = "wikitext"
    default_stride: ClassVar[int | None] = 32

    def prepare(self, text: bytes) -> str:
        return detokenize(text.decode("utf-8-sig").strip())

    def count_words(self, text: bytes) -> int:
        return count_words(text.decode("utf-8-sig"))

    def more_metrics(self, loss: np.ndarray, share: np.ndarray) -> dict[str, Metric]:
        return {"word_perplexity": Metric(loss, share * self.words, np.exp)}

    def more_counts(self) -> dict[str, int]:
        return {"words": self.words, **super().more_counts()}
