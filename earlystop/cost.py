"""What tokens cost: in money for reports, in cost units for budgets.

Money is decimal, never floating point. Cost units are a float32 table over the vocabulary; one unit is one token
unless a table says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from earlystop.errors import ConfigError

FloatTable = NDArray[np.float32]

_MILLION = Decimal(1_000_000)
_ZIPF_SHIFT = 2.7
"""Shift of the Zipf-Mandelbrot law for words (Mandelbrot 1953, "An informational theory of the statistical structure
of language"), whose exponent is close to 1."""


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of one model in money per million tokens.

    Prices are given as a string, an int or a Decimal; a float is refused, since it is not the price on the list.

    Raises:
        ConfigError: A price that is a float, negative, or not a finite number.
    """

    prompt: Decimal
    """Price of a million prompt tokens."""
    completion: Decimal
    """Price of a million completion tokens, reasoning included."""
    cached_prompt: Decimal | None = None
    """Price of a million prompt tokens read from the cache; the prompt's price if None."""
    currency: str = "USD"

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached_prompt"):
            value = getattr(self, name)
            if value is not None:
                msgspec.structs.force_setattr(self, name, _price(name, value))

    def cost(
        self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int = 0
    ) -> Decimal:
        """The price of one request: ``(prompt - cached) × p + cached × c + completion × o``, exactly.

        Args:
            prompt_tokens: Prompt tokens, cached ones included.
            cached_tokens: Those of them that were read from the cache.
            completion_tokens: Completion tokens, reasoning included.
            reasoning_tokens: Those of them that were reasoning; they are not billed a second time.

        Raises:
            ConfigError: A count that is negative or no whole number, or a part that is larger than its whole.
        """
        counts = {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "completion_tokens": completion_tokens,
            "reasoning_tokens": reasoning_tokens,
        }
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"{name}={count!r} is not allowed: give a whole number of at least 0", field=name)
        for part, whole in (("cached_tokens", "prompt_tokens"), ("reasoning_tokens", "completion_tokens")):
            if counts[part] > counts[whole]:
                raise ConfigError(
                    f"{part}={counts[part]} is more than {whole}={counts[whole]}, of which it is a part", field=part
                )
        cached_price = self.prompt if self.cached_prompt is None else self.cached_prompt
        with localcontext() as context:
            context.prec = 60
            total = (
                (prompt_tokens - cached_tokens) * self.prompt
                + cached_tokens * cached_price
                + completion_tokens * self.completion
            )
            return total / _MILLION


def _price(name: str, value: Any) -> Decimal:
    refused = f"{name}={value!r} ({type(value).__name__}) is not allowed: give a price of at least 0"
    if isinstance(value, bool | float) or not isinstance(value, str | int | Decimal):
        raise ConfigError(f"{refused} as a string such as '0.625', an int or a Decimal", field=name)
    try:
        price = Decimal(value)
    except InvalidOperation:
        raise ConfigError(f"{refused}, such as '0.625'", field=name) from None
    if not price.is_finite() or price < 0:
        raise ConfigError(refused, field=name)
    return price


def uniform(vocab_size: int) -> FloatTable:
    """One cost unit a token, so that a budget counts tokens; float32 [vocab_size]."""
    return np.ones(_checked_size(vocab_size), dtype=np.float32)


def by_rarity(
    frequencies: ArrayLike | None = None, *, vocab_size: int | None = None, ranks: Sequence[int] | None = None
) -> FloatTable:
    """Rare tokens cost more: a token costs its surprisal over the mean surprisal.

    ``cost(i) = ln p(i) / sum_j p(j) ln p(j)``, Shannon's information of the token under a unigram distribution over
    its entropy (Shannon 1948, "A mathematical theory of communication"). A token drawn from p costs 1 on average, so
    that budgets keep their size. p comes from counts with one added to each (Laplace), or, lacking counts, from ranks
    by the Zipf-Mandelbrot law ``p ∝ 1 / (rank + 2.7)``: a byte-pair vocabulary is ordered by merge frequency, so the
    token's id is its rank.

    Args:
        frequencies: Count of each token in some corpus, [vocabulary], each at least 0.
        vocab_size: Size of the vocabulary where neither counts nor ranks are given.
        ranks: Rank of each token from 0 (the most frequent), [vocabulary].

    Returns:
        Cost units, float32 [vocabulary]; all 1 for a vocabulary of one token.

    Raises:
        ConfigError: Not exactly one of the three was given, or it holds something else.
    """
    if sum(x is not None for x in (frequencies, vocab_size, ranks)) != 1:
        raise ConfigError("by_rarity needs exactly one of frequencies, ranks and vocab_size")
    if frequencies is not None:
        p = checked_costs(frequencies, name="frequencies").astype(np.float64) + 1
    else:
        order = np.arange(_checked_size(vocab_size)) if ranks is None else checked_costs(ranks, name="ranks")
        p = 1 / (order.astype(np.float64) + _ZIPF_SHIFT)
    p /= p.sum()
    surprisal = -np.log(p)
    mean = float(p @ surprisal)
    return (surprisal / mean).astype(np.float32) if mean > 0 else np.ones_like(p, dtype=np.float32)


def checked_costs(costs: ArrayLike, vocab_size: int | None = None, *, name: str = "costs") -> FloatTable:
    """A cost table from outside (a profile's `costs`), checked.

    Args:
        costs: Cost units per token id, [vocabulary].
        vocab_size: The vocabulary's size, None to take the table's.
        name: What to call the table in an error.

    Returns:
        float32 [vocabulary], a new array.

    Raises:
        ConfigError: Not one-dimensional, empty, of the wrong length, not numbers, negative, NaN or infinite.
    """
    try:
        table = np.array(costs, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} are not numbers: {error}", field=name) from error
    if table.ndim != 1 or not table.size:
        raise ConfigError(f"{name} have shape {table.shape}, not (vocabulary,)", field=name)
    if vocab_size is not None and table.size != vocab_size:
        raise ConfigError(f"{name} have {table.size} entries, the vocabulary has {vocab_size}", field=name)
    bad = np.flatnonzero(~(np.isfinite(table) & (table >= 0)))
    if bad.size:
        raise ConfigError(f"{name}[{bad[0]}] is {table[bad[0]]}: a finite number of at least 0 is needed", field=name)
    return table


def _checked_size(vocab_size: int | None) -> int:
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"vocab_size={vocab_size!r} is not allowed: give a whole number of at least 1")
    return vocab_size
