"""Tests for attention: edge cases of any function, and shapes in letters.

`assert not report.wrong, report` of a `conformance` report is a whole test.
"""

from jattn.reports import Finding as Finding
from jattn.reports import Report as Report
from jattn.testing.assertions import assert_attention_shapes as assert_attention_shapes
from jattn.testing.suite import Conformance as Conformance
from jattn.testing.suite import conformance as conformance
