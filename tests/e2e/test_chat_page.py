"""The chat page in a real browser, in front of a real gateway and a real server."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.server import RunningServer, running_server
from deepseek_triton.server.ports import resolve_ports
from tests.e2e.chromium import running_browser
from tests.e2e.conftest import options
from tests.e2e.support import is_idle, settled, wait_until
from tests.e2e.test_speculation import DEMO

# What a browser says of an answer of 400, and of markup that a test puts in on purpose.
EXPECTED = ("Failed to load resource", "Executing inline event handler violates")
PHONE = {"width": 360, "height": 640}
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script>**x**'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("page")
    build_engine(DEMO, folder / "engine")
    with running_server(options(folder / "engine"), log_path=folder / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def address(served: RunningServer) -> Iterator[str]:
    port = resolve_ports("127.0.0.1", {"gateway": 0})["gateway"]
    command = [
        sys.executable,
        "-m",
        "deepseek_triton.gateway",
        "--engine",
        str(served.log_path.with_name("engine")),
    ]
    command += ["--triton", served.grpc_url, "--gateway-port", str(port)]
    log_path = served.log_path.with_name("gateway.log")
    with log_path.open("w") as log, subprocess.Popen(command, stderr=log) as gateway:
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/ready"), 30.0, "gateway is ready")
            yield f"http://127.0.0.1:{port}/"
        finally:
            gateway.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture
def page(browser: Browser, address: str, served: RunningServer) -> Iterator[Page]:
    """The page, loaded; a test fails if it complained or asked anybody else for anything."""
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    complaints: list[str] = []
    others: list[str] = []
    page.on("console", lambda line: line.type == "error" and complaints.append(line.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda sent: others.append(sent.url))
    page.goto(address)
    expect(page.locator("#model option")).to_have_count(1)
    yield page
    context.close()
    wait_until(lambda: is_idle(served), 5.0, "the engine is idle after the test")
    assert [url for url in others if not url.startswith((address, "data:"))] == []
    assert [text for text in complaints if not text.startswith(EXPECTED)] == []


def choose(page: Page, **settings: str) -> None:
    page.get_by_text("Settings").click()
    for name, value in settings.items():
        field = page.locator(f"#{name.replace('_', '-')}")
        if name == "mode":
            field.select_option(value)
        else:
            field.fill(value)
    page.get_by_text("Settings").click()


def test_a_text_is_continued_and_figures_shown(page: Page) -> None:
    choose(page, mode="complete", temperature="0", max_tokens="40")
    page.locator("#input").fill("def read_lines(path):\n")
    page.get_by_role("button", name="Send").click()
    answer = page.locator("article.assistant")
    expect(answer.locator(".figures")).to_contain_text("tokens/s", timeout=20_000)
    expect(answer.locator(".figures")).to_contain_text("first after")
    assert "path" in answer.locator(".text").inner_text()
    expect(page.locator("article.user .text")).to_have_text("def read_lines(path):")


def test_a_conversation_goes_on_with_the_keyboard_alone(page: Page) -> None:
    choose(page, temperature="0", max_tokens="12")
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda sent: bodies.append(json.loads(sent.post_data)) if sent.method == "POST" else None,
    )
    page.locator("#input").focus()
    for number, text in enumerate(("one", "two"), start=1):
        page.keyboard.type(text)
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("more")
        page.keyboard.press("Enter")
        expect(page.locator("article.assistant .foot")).to_have_count(number, timeout=20_000)
        expect(page.locator("#input")).to_be_focused()
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles in (["user", "assistant", "user"], ["user"])
    assert bodies[1]["messages"][-1]["content"] == "two\nmore"
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_frees_the_engine(page: Page, served: RunningServer, way: str) -> None:
    before = settled(served).get("requests_finished_total.cancelled", 0.0)
    choose(page, mode="complete", temperature="1", max_tokens="1900")
    page.locator("#input").fill("import os\nimport sys\n\n\ndef main():\n")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant .text")).not_to_be_empty(timeout=20_000)
    wait_until(lambda: not is_idle(served), 2.0, "the request shows in the metrics")
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    wait_until(lambda: is_idle(served), 2.0, "the engine's request has ended")
    expect(page.locator(".figures")).to_contain_text("stopped")
    assert settled(served)["requests_finished_total.cancelled"] == before + 1


def scripted(page: Page, *deltas: dict[str, str]) -> None:
    """Answer the page's next chat request with these deltas."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "length"})
    lines = [json.dumps({"choices": [choice]}) for choice in choices]
    lines.append(json.dumps({"choices": [], "usage": {"completion_tokens": 7}}))
    body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)


def test_reasoning_is_folded_and_opens(page: Page) -> None:
    scripted(page, {"reasoning_content": "1 + 1 is "}, {"reasoning_content": "2"}, {"content": "2"})
    page.locator("#input").fill("1+1?")
    page.keyboard.press("Enter")
    answer = page.locator("article.assistant")
    expect(answer.locator(".text")).to_have_text("2")
    expect(answer.locator(".figures")).to_contain_text("7 tokens")
    expect(answer.locator(".figures")).to_contain_text("cut at the limit")
    expect(answer.locator(".reasoning div")).to_be_hidden()
    answer.get_by_text("Reasoning").click()
    expect(answer.locator(".reasoning div")).to_have_text("1 + 1 is 2")


def test_what_a_model_writes_stays_text(page: Page) -> None:
    scripted(page, {"content": MARKUP}, {"content": "\n```python\nx = '<b>'\n```\n"})
    page.locator("#input").fill(MARKUP)
    page.keyboard.press("Enter")
    answer = page.locator("article.assistant .text")
    expect(answer).to_contain_text("**x**")
    assert MARKUP in answer.inner_text()
    expect(answer.locator("pre code")).to_have_text("x = '<b>'")
    assert page.locator("main img, main script, main b").count() == 0
    assert page.title() == "deepseek-triton"
    # And if it did become markup, the policy would not run it.
    with page.expect_console_message(lambda line: "Content Security Policy" in line.text):
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<i onclick=x()></i>')")
        page.evaluate("document.querySelector('i').click()")


def test_an_error_is_told_in_words(page: Page) -> None:
    choose(page, mode="complete", max_tokens="999999")
    page.locator("#input").fill("x")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens")
    expect(page.locator(".figures")).to_contain_text("failed")


def test_nothing_is_wider_than_a_phone(page: Page) -> None:
    scripted(page, {"content": "a" * 500 + "\n```\n" + "b" * 500 + "\n```"})
    page.locator("#input").fill("wide")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant pre")).to_be_visible()
    page.get_by_text("Settings").click()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width == PHONE["width"]
