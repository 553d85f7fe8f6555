from report_example import make_report

from compress.evaluation.page import html


def test_page() -> None:
    assert "Is it good enough" in html(make_report(), "", "")
