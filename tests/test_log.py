"""One event is one line, whatever its fields hold."""

import io
import logging

import pytest

from benthic import log


@pytest.fixture
def stream():
    logger = logging.getLogger("benthic")
    before = (logger.handlers[:], logger.level, logger.propagate)
    stream = io.StringIO()
    log.setup("info", stream)
    yield stream
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_fields_follow_the_message(stream: io.StringIO) -> None:
    logging.getLogger("benthic.cache.blocks").info(
        "blocks evicted", extra={"tier": "host", "blocks": 128, "share": 0.5}
    )
    line = stream.getvalue()
    assert line.endswith(" info benthic.cache.blocks: blocks evicted tier=host blocks=128 share=0.5\n")
    assert line[10] == "T"
    assert line[23] == "Z"


def test_values_that_would_break_the_line_are_quoted(stream: io.StringIO) -> None:
    logging.getLogger("benthic.x").info(
        "an event\nof two lines", extra={"path": "a b", "text": 'say "x"\n', "empty": ""}
    )
    assert stream.getvalue().count("\n") == 1
    assert 'path="a b" text="say \\"x\\"\\n" empty=""' in stream.getvalue()


def test_an_exception_stays_on_the_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("benthic.x").exception("step failed")
    assert stream.getvalue().count("\n") == 1
    assert 'error="ValueError: bad"' in stream.getvalue()


def test_level_and_second_setup(stream: io.StringIO) -> None:
    logging.getLogger("benthic.x").debug("quiet")
    assert stream.getvalue() == ""
    other = io.StringIO()
    log.setup("debug", other)
    logging.getLogger("benthic.x").debug("heard")
    assert stream.getvalue() == ""
    assert "heard" in other.getvalue()
