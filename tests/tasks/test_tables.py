"""Tables of scores: shares and spreads, and what a head is told of its row."""

from __future__ import annotations

import pytest

from veca.tasks.base.tables import Row, Table


def table(better: str, means: list[float]) -> Table:
    rows = [
        Row(name, name, "", size, size, cores, {"score": [mean - 0.01, mean + 0.01]})
        for (name, size, cores), mean in zip(
            [("first", 64, 8), ("first", 64, 16), ("first", 96, 16), ("second", 64, None), ("second", 128, None)],
            means,
            strict=True,
        )
    ]
    return Table("classify", "data", "score", better, rows=rows)


def test_shares_are_of_the_first_models_largest_budget_at_the_same_size() -> None:
    high = table("higher", [0.4, 0.5, 0.8, 0.25, 0.3])
    assert [high.share(row) for row in high.rows] == [pytest.approx(0.8), 1.0, 1.0, pytest.approx(0.5), None]
    low = table("lower", [1.0, 0.5, 1.0, 2.0, 1.0])
    assert low.share(low.rows[3]) == pytest.approx(0.25)
    assert high.rows[0].deviation("score") == pytest.approx(0.01 * 2**0.5)
    assert "0.5000 ± 0.0141" in high.text()
