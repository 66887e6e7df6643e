import io
import logging
import re

import pytest

from deepseek_triton.log import configure_logging, request_logger


@pytest.fixture
def stream():
    package = logging.getLogger("deepseek_triton")
    before = package.handlers[:], package.level, package.propagate
    stream = io.StringIO()
    configure_logging("INFO", stream)
    yield stream
    package.handlers[:], package.propagate = before[0], before[2]
    package.setLevel(before[1])


def test_a_line_has_time_level_module_and_message(stream):
    logging.getLogger("deepseek_triton.engine.loop").info("ready after %d s", 3)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO "
        r"deepseek_triton\.engine\.loop ready after 3 s\n",
        stream.getvalue(),
    )


def test_a_line_about_a_request_has_its_key(stream):
    logger = logging.getLogger("deepseek_triton.engine")
    request_logger(logger, "r-7").warning("preempted")
    assert stream.getvalue().endswith("WARNING deepseek_triton.engine [r-7] preempted\n")


def test_lines_below_the_level_are_dropped(stream):
    logging.getLogger("deepseek_triton.engine").debug("detail")
    assert stream.getvalue() == ""


def test_configuring_again_replaces_the_handler(stream):
    again = io.StringIO()
    configure_logging("INFO", again)
    logging.getLogger("deepseek_triton").error("once")
    assert stream.getvalue() == ""
    assert again.getvalue().count("once") == 1
