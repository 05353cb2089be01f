"""The declared metrics are the exposed ones."""

import re

from benthic import metrics


def test_every_declared_metric_is_exposed_with_its_help() -> None:
    text = metrics.exposition()
    for row in metrics.DECLARED:
        name = row.name.removesuffix("_total") if row.kind == "counter" else row.name
        assert re.search(rf"^# HELP {name}(_total)? ", text, re.MULTILINE), row.name
        assert re.search(rf"^# TYPE {name}(_total)? {row.kind}$", text, re.MULTILINE), row.name


def test_names_carry_their_unit_and_prefix() -> None:
    for row in metrics.DECLARED:
        assert row.name.startswith("benthic_")
        assert row.kind != "counter" or row.name.endswith("_total")
        assert row.kind != "histogram" or row.name.endswith("_seconds")
        assert row.help[0].islower()


def test_names_are_unique() -> None:
    names = [row.name for row in metrics.DECLARED]
    assert len(set(names)) == len(names)
