"""The reference of metrics names every series there is, with its labels and their values."""

import re

import pytest

from kvbridge.connector.series import SERIES, Series
from kvbridge.session import CAUSES
from tests.contract.tables import page, rows

PAGE = page("metrics.md")
LISTED = {cells[0].strip("`"): cells[1:] for cells in rows(PAGE, "## Series")}


def test_every_series_is_listed_and_no_other() -> None:
    assert sorted(LISTED) == sorted(SERIES)


@pytest.mark.parametrize("series", SERIES.values(), ids=lambda each: each.name)
def test_a_series_is_listed_as_it_is(series: Series) -> None:
    kind, labels, meaning = LISTED[series.name]
    assert kind == series.kind
    assert tuple(re.findall(r"`(\w+)`", labels)) == series.labels
    values = {value for row in series.rows for value in row} - {"read", "ok", "failed", ""}
    if "reason" in series.labels and values & set(CAUSES):
        return  # in a section of their own
    assert values <= set(re.findall(r"`(\w+)`", meaning))


def test_every_cause_is_explained() -> None:
    explained = [cells[0].strip("`") for cells in rows(PAGE, "## Why a load has failed")]
    assert explained == list(CAUSES)


def test_reasons_of_handshakes_are_explained() -> None:
    explained = PAGE.partition("The `reason` of a failed handshake is")[2].partition("\n## ")[0]
    reasons = {row[-1] for row in SERIES["kvbridge_handshakes_total"].rows} - {""}
    assert set(re.findall(r"`(\w+)`", explained)) == reasons


def test_alerts_are_about_what_there_is() -> None:
    alerts = " ".join(cells[0] for cells in rows(PAGE, "## What to alert on"))
    selectors = re.findall(r"(kvbridge_\w+)(?:\{(.*?)\})?", alerts)
    assert len(selectors) > 10
    for name, matchers in selectors:
        series = SERIES[name]
        for label, values in re.findall(r'(\w+)=~?"(.*?)"', matchers):
            at = series.labels.index(label) - len(series.labels)
            known = {row[at] for row in series.rows}
            assert set(values.split(r"\|")) <= known, f"{name}{{{matchers}}}"
