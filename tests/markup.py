"""What is asked of every page."""

from html.parser import HTMLParser


class _Nesting(HTMLParser):
    """Follows the tags of a page; `stack` holds those that are open."""

    def __init__(self):
        super().__init__()
        self.stack = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "hr"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def assert_well_formed(page):
    """Every tag is closed, and none before those within it."""
    nesting = _Nesting()
    nesting.feed(page)
    assert not nesting.stack
