from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.cost import CostModel, by_rarity, checked_costs, uniform
from earlystop.errors import ConfigError

PRICES = CostModel(prompt="1.25", cached_prompt="0.625", completion=10)


def test_cached_tokens_are_billed_once_and_cheaper():
    """The reported request costs 0.184918125, not 0.7642."""
    assert PRICES.cost(262_960, 257_955, 1_744) == Decimal("0.184918125")


def test_reasoning_is_part_of_the_completion():
    """482 completion tokens are billed whatever share of them was reasoning."""
    assert PRICES.cost(0, 0, 482, 448) == PRICES.cost(0, 0, 482) == Decimal("0.00482")


def test_without_a_cache_price_cached_tokens_cost_the_prompts():
    """No price for cached tokens is no discount."""
    assert CostModel(prompt=2, completion=0).cost(500_000, 500_000, 0) == 1


@pytest.mark.parametrize("price", [0.625, True, "-1", "NaN", "Infinity", "abc", None, -1, [1]])
def test_a_price_that_is_no_exact_amount_is_refused(price):
    """Floats, booleans, negative and non-finite prices are no prices."""
    with pytest.raises(ConfigError, match="prompt"):
        CostModel(prompt=price if price is not None else 0.0, completion=1)


@pytest.mark.parametrize("counts", [(1, 2, 0, 0), (0, 0, 1, 2), (-1, 0, 0, 0), (1.0, 0, 0, 0), (True, 0, 0, 0)])
def test_counts_that_cannot_be_are_refused(counts):
    """A part larger than its whole, a negative or fractional count is an error."""
    with pytest.raises(ConfigError, match="_tokens="):
        PRICES.cost(*counts)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=5))
def test_a_stream_costs_what_the_whole_costs(parts):
    """Costs add up exactly, in whatever pieces and decimal context they are taken."""
    parts = [(max(a, b), min(a, b), c) for a, b, c in parts]
    whole = PRICES.cost(*(sum(column) for column in zip(*parts, strict=True))) if parts else Decimal(0)
    with localcontext() as context:
        context.prec = 60
        assert sum((PRICES.cost(*part) for part in parts), Decimal(0)) == whole
    with localcontext() as context:
        context.prec = 3
        assert all(PRICES.cost(*part) * 0 == 0 for part in parts)


def test_uniform_costs_count_tokens():
    """One unit a token."""
    table = uniform(127)
    assert table.dtype == np.float32
    assert table.shape == (127,)
    assert (table == 1).all()


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=50))
def test_rare_tokens_cost_more_and_the_average_token_costs_one(counts):
    """By rarity the order of costs is that of rarity, and budgets keep their size."""
    table = by_rarity(counts)
    p = (np.array(counts, dtype=np.float32).astype(float) + 1) / (np.array(counts, dtype=np.float32) + 1.0).sum()
    order = np.argsort(p)
    assert (np.diff(table[order]) <= 1e-6).all()
    assert float(p @ table) == pytest.approx(1, rel=1e-4)
    assert (table >= 0).all()


def test_without_counts_the_id_is_the_rank():
    """In a byte-pair vocabulary later ids are rarer; explicit ranks say the same."""
    table = by_rarity(vocab_size=49_152)
    assert (np.diff(table) > 0).all()
    assert np.array_equal(table, by_rarity(ranks=range(49_152)))


def test_a_vocabulary_of_one_token_costs_one():
    """No division by an entropy of zero."""
    assert by_rarity([5]).tolist() == [1.0]


@pytest.mark.parametrize("arguments", [{}, {"frequencies": [1], "vocab_size": 1}, {"vocab_size": 0}, {"ranks": []}])
def test_by_rarity_needs_one_source(arguments):
    """None or two sources of rarity are refused."""
    with pytest.raises(ConfigError):
        by_rarity(**arguments)


@pytest.mark.parametrize("costs", [[], [[1.0]], [1, -1], [float("nan")], [float("inf")], ["a"], None, 3, [1, 2]])
def test_a_broken_table_is_refused(costs):
    """Only finite costs of at least 0, one for each token of the vocabulary."""
    with pytest.raises(ConfigError, match="costs"):
        checked_costs(costs, vocab_size=3)


def test_a_good_table_is_copied():
    """Changing the input later changes no cost."""
    source = np.array([0, 1, 2.5], dtype=np.float32)
    table = checked_costs(source, 3)
    source[:] = 9
    assert table.tolist() == [0, 1, 2.5]
