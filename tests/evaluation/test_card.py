from report_example import make_report

from compress.evaluation.card import card


def test_card() -> None:
    assert card(make_report(), "r", "", None).startswith("---\n")
