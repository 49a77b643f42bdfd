"""The scripts of the shared scripted engines, by key; a test that needs another adds it here.

All engine tests of one runner share one engine, and a checkpoint must know its scripts when it is made. Up to 512 fit.
Names that start with a letter and a number are cases of public bug reports, told there in the words of the toy
vocabulary: 1 and 2 open and close thinking, 3 is EOS, 4 and 5 a tool call, 11 to 19 words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from support.scripted import Script, Step, gap_for
from support.vocabulary import token_ids

IDS: Final = token_ids()
WORDS: Final = [IDS[f"w{n}"] for n in range(1, 74)]
"""Seventy-three different words."""

CLOSE_TEXT: Final = "\n\nWait"
"""The transition text that the shared scripted engines force before the end tag; two tokens, blank_line and wait."""

_THINK, _CLOSE, _EOS, _LINE = IDS["think"], IDS["end_think"], IDS["eos"], IDS["blank_line"]
_ANSWER: Final = (IDS["w21"], IDS["w22"], IDS["w23"], IDS["period"], _EOS)


def paragraphs(count: int, words: int, *, topic: int | None = None, shift: int = 7) -> list[Step]:
    """Paragraphs of some words and a blank line.

    Args:
        count: How many.
        words: Words in each, before the blank line.
        topic: The hidden state's direction throughout (all paragraphs alike); None: fresh at every token.
        shift: By how many words each paragraph starts further on in `WORDS`; 0 repeats the same text.
    """
    return [
        Step(token, topic=topic)
        for number in range(count)
        for token in (*(WORDS[(number * shift + i) % len(WORDS)] for i in range(words)), _LINE)
    ]


def enumeration(count: int, words: int, *, topic: int) -> list[Step]:
    """Paragraphs of one topic in which hardly any four words ever follow each other twice: each has its own stride."""
    return [
        Step(token, topic=topic)
        for number in range(count)
        for token in (*(WORDS[(number + i * (number + 2)) % len(WORDS)] for i in range(words)), _LINE)
    ]


SCRIPTS: Final[Mapping[str, Script]] = {
    # Plain text, no thinking.
    "short": Script([*WORDS[:8], IDS["period"], _EOS]),
    "endless": Script([WORDS[i * 7 % 73] for i in range(900)]),
    "fresh": Script([*paragraphs(20, 19), _EOS]),
    "loop": Script([*paragraphs(3, 19), *paragraphs(30, 19, topic=1, shift=0), _EOS]),
    # New words throughout although the hidden states look alike: an enumeration, which must be left whole.
    "enumeration": Script([*enumeration(25, 19, topic=2), _EOS]),
    "sure": Script([*(Step(word, gap=gap_for(0.97)) for word in WORDS), _EOS]),
    "unsure": Script([*(Step(word, gap=gap_for(0.2)) for word in WORDS), *(Step(w, gap=gap_for(0.02)) for w in WORDS)]),
    # Reasoning: however the block is closed, the answer follows.
    "reasons": Script([*WORDS[:30], _CLOSE], prompt=[_THINK], answer=_ANSWER),
    "reasons_long": Script([*paragraphs(40, 19)], prompt=[_THINK], answer=_ANSWER),
    "reasons_for_ever": Script([*paragraphs(40, 19)], prompt=[_THINK]),
    # A prompt that a small chunk splits many times, with a thinking block open at its end.
    "long_prompt": Script(
        [*paragraphs(8, 19)], prompt=[*(WORDS[i * 5 % 73] for i in range(200)), _THINK], answer=_ANSWER
    ),
    # Repeats itself at once, so that n-gram drafts are found and accepted.
    "drafted": Script([WORDS[i % 5] for i in range(400)]),
    "drafted_thinking": Script([WORDS[i % 5] for i in range(400)], prompt=[_THINK], answer=_ANSWER),
    # Numbers that are none.
    "nan": Script([*WORDS[:4], Step(WORDS[4], fill=math.nan), *WORDS[5:9], _EOS]),
    "one_nan": Script([*WORDS[:4], Step(WORDS[4], logits={WORDS[9]: math.nan}), *WORDS[5:9], _EOS]),
    "plus_inf": Script([*WORDS[:4], Step(WORDS[4], logits={WORDS[9]: math.inf}), *WORDS[5:9], _EOS]),
    "all_minus_inf": Script(
        [*WORDS[:4], Step(WORDS[4], logits={WORDS[4]: -math.inf}, fill=-math.inf), *WORDS[5:9], _EOS]
    ),
    # Reduced from public reports.
    "a1_tool_call": Script([11, 12, 4, 9, 13, 14, 15, 10, 5, 3], prompt=[1]),
    "a3_natural_end": Script([11, 12, 13, 2, 14, 15, 16, 17, 3], prompt=[1]),
    "a4_reentry_forced": Script([11, 12, 13, 13, 14, 1, *[15] * 40], prompt=[1]),
    "a4_reentry_natural": Script([11, 2, 14, 1, *[15] * 40], prompt=[1]),
    "a5_open_after_history": Script([*WORDS[:10], 3], prompt=[1, 11, 2, 14, 1]),
    "a5_open_after_end_marks": Script([*WORDS[:10], 3], prompt=[11, 2, 12, 2, 1]),
    "a5_closed": Script([*WORDS[:10], 3], prompt=[1, 6, 2]),
    "a6_opens_itself": Script([1, *WORDS[:40], 3]),
    "a7_newline_after_tag": Script([*WORDS[:20], 2, 14, 3], prompt=[1, 6]),
    "a11_eos_in_thinking": Script([11, 12, 13, 3, 14, 15, 16], prompt=[1]),
    "a15_split_character": Script([11, 12, 30, 31, 13, 32, 33, 34, 35, 14, 15, 3], prompt=[1]),
    "a15_six_blocks": Script([*[1, 11, 12, 2, 13] * 6, 3]),
    "c13_marks": Script([1, 11, 2, 14, 3]),
}
