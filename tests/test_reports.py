"""Findings, and what they amount to."""

import pytest

from jattn.reports import Finding, Report, shown_bytes


def report_of(*verdicts):
    return Report(tuple(Finding(f"check {x}", x, "as it is") for x in verdicts))


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["right", "refused", "not run", "not offered"], "right"),
        (["right", "inconclusive", "refused"], "inconclusive"),
        (["inconclusive", "right", "wrong"], "wrong"),
        (["not run", "refused"], "refused"),
        (["not run", "not offered"], "not offered"),
        ([], "not run"),
    ],
)
def test_a_report_is_right_if_something_is_and_nothing_is_wrong_or_open(
    verdicts, whole
):
    report = report_of(*verdicts)
    assert report.verdict == whole and report.ok == (whole == "right")
    assert (report.first is None) == (whole not in ("wrong", "inconclusive"))


def test_what_is_wrong_is_seen_from_afar():
    report = report_of("right", "wrong")
    assert str(report).splitlines() == [
        "Report: WRONG",
        "  right         check right  as it is",
        "  WRONG         check wrong  as it is",
    ]
    assert report.wrong == report.having("wrong") == (report["check wrong"],)
    assert list(report) == list(report.findings)
    with pytest.raises(KeyError):
        report["check"]


def test_bytes_have_the_unit_that_fits():
    sizes = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 2.345e9: "2.35 GB", 7e14: "700 TB"}
    assert {size: shown_bytes(size) for size in sizes} == sizes
