"""The chat page in a real browser, as its users meet it."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from headless_browser import CHROMIUM, Browser
from tiny_chat import chat_model
from tiny_server import expected, running

HOSTILE = (
    "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script> "
    "[x](javascript:document.title='broken') **<b onclick=1>bold</b>**\n"
    "```\n</code></pre><script>1</script>\n```"
)
ENTER, ESCAPE = ("Enter", 13), ("Escape", 27)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def server():
    with running(chat_model()) as started:
        yield started


@pytest.fixture
def browser(server):
    opened = Browser()
    opened.visit(server.url)
    yield opened
    assert opened.complaints == []
    assert {url.split("/")[2] for url in opened.requested if url.startswith("http")} == {
        server.url.split("/")[2]
    }
    opened.close()


def answered(browser: Browser, number: int) -> None:
    browser.until(f"!running && document.querySelectorAll('.assistant').length === {number}")


def test_a_question_is_answered_kept_and_asked_again(browser, server):
    browser.value("localStorage.clear(), longest.value = 20, longest.onchange(), null")
    browser.value("question.focus()")
    browser.type("Hello")
    browser.press(*ENTER)
    answered(browser, 1)
    _, text = expected(
        chat_model(), [{"role": "user", "content": "Hello"}], do_sample=False, max_new_tokens=20
    )
    assert browser.value("messages[1].content") == text
    assert "per step" in browser.value("document.querySelector('.assistant .who').textContent")
    browser.click("#colours")
    assert browser.value("document.querySelector('.assistant .raw').textContent") == text
    browser.visit(server.url)
    assert browser.value("messages.map((each) => each.content)") == ["Hello", text]
    browser.value(
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Regenerate').click()"
    )
    answered(browser, 1)
    assert browser.value("messages[1].content") == text
    browser.value("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Edit').click()")
    assert browser.value("[question.value, messages.length]") == ["Hello", 0]
    browser.click("#new")
    assert browser.value("document.querySelectorAll('.message').length") == 0


def test_an_answer_can_be_stopped_with_the_keyboard(browser, server):
    batch = server.service.worker.batches[False]
    step = batch.step

    def slow():
        time.sleep(0.1)
        return step()

    batch.step = slow
    try:
        browser.value("localStorage.clear(), longest.value = 400, question.focus()")
        browser.type("Hello")
        browser.press(*ENTER)
        browser.until("running && document.querySelector('.assistant .note')?.textContent")
        browser.press(*ESCAPE)
        browser.until("!running && document.getElementById('status').textContent === 'stopped'")
    finally:
        batch.step = step
    assert browser.value("messages.length >= 1")


def test_a_race_ends_with_the_same_text_on_both_sides(browser):
    browser.value(
        "localStorage.clear(), longest.value = 24, seed.value = 3, temperature.value = 1, question.focus()"
    )
    browser.type("Hello")
    browser.click("#race")
    browser.until("document.querySelectorAll('.race section').length === 2")
    browser.until("!running")
    verdict = browser.value("document.querySelector('main > p.note')?.textContent")
    assert verdict.startswith("The same text.") and "times as fast" in verdict
    assert not browser.value("document.querySelector('main button').disabled")


def test_what_a_model_says_never_becomes_part_of_the_page(browser):
    text = json.dumps(HOSTILE)
    browser.value(
        f"messages = [{{role: 'user', content: {text}}}, {{role: 'assistant', content: {text}, "
        f"pieces: [[{text}, 1]]}}], draw()"
    )
    for _ in range(2):
        shown = browser.value("document.querySelector('.assistant .body').innerText")
        assert "<img src=x" in shown and "</code></pre>" in shown
        found = browser.value("document.querySelectorAll('main img, main script, main a, main b').length")
        assert found == 0 and browser.value("document.title") == "medusa"
        browser.click("#colours")
    # Were it to slip through, the page's own rules would still refuse to run it.
    browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    browser.value("new Promise((done) => setTimeout(done, 200))")
    assert browser.value("document.title") == "medusa"


def test_it_fits_a_phone_and_the_dark(browser):
    browser.send(
        "Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True
    )
    light = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.value("document.documentElement.scrollWidth <= 360")
    assert browser.value("getComputedStyle(document.body).backgroundColor") != light


def test_the_page_says_what_it_may_load(server):
    reply = httpx.get(server.url)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy and "sha256-" in policy
    assert "http://" not in reply.text and "https://" not in reply.text
