"""Progress bars, where nobody watches and whatever a file is called."""

from __future__ import annotations

import pytest

from veca.progress import progress, reporting


def test_the_items_come_through_and_a_log_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(iter("abc"), "reading", 3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["[/b].tif", "[red]slide.tif"])
def test_a_name_is_shown_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are markup to rich: a closing one that nothing opened ended `veca scan` with a traceback."""
    with reporting(name) as report:
        report("layer 1 of 2", 3, 6)
    out, shown = capsys.readouterr()
    assert out == ""
    assert f"{name}: layer 1 of 2" in shown
    assert "50%" in shown


def test_a_bar_that_is_not_shown_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting("slide.tif", shown=False) as report:
        report("layer 1 of 2", 3, 6)
    assert capsys.readouterr() == ("", "")
