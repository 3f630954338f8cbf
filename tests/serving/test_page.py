"""The chat page in a real browser, as its users meet it."""

from __future__ import annotations

import json
import time
from contextlib import closing

import httpx
import pytest
from headless_browser import CHROMIUM, Browser
from tiny_chat import chat_model
from tiny_server import expected, running

SET = "document.title='broken'"
HOSTILE = [
    f'<img src=x onerror="{SET}"><script>{SET}</script> [x](javascript:{SET}) **<b onclick=1>bold</b>**',
    "```\n</code></pre><script>1</script>\n```",
    f"[a](javascript&#58;{SET}) [b](JaVaScRiPt:{SET}) [c](data:text/html,<script>{SET}</script>)",
    f"<javascript:{SET}> <https://other.example/> https://other.example",
    f'![x](x "onerror={SET}") !["onerror={SET}](x)',
    f"<svg><style><img src=x onerror={SET}></style></svg><math><mtext><script>{SET}</script>",
    f'<iframe srcdoc="<script>{SET}</script>"></iframe><object data="javascript:{SET}"></object>',
    f"| a | <img src=x onerror={SET}> |\n|---|---|\n| <svg onload={SET}> | `</td><script>{SET}</script>` |",
    f'[x]: javascript:{SET} "<img src=x onerror={SET}>"\n\n[x] <form action="javascript:{SET}"><button>',
    f"<details open ontoggle={SET}><a href='//other.example/'>x</a><base href=//other.example/>",
    "[link](https://other.example/) ![seen](https://other.example/i.png) <style>*{}</style>",
    "> " * 3000 + "deep",
    "[" * 3000 + "deep" + "](x)" * 3000,
]
TAMED = """[...document.querySelectorAll('.assistant .body *')].every((each) =>
    TAGS.includes(each.localName) || ['div', 'span'].includes(each.localName)) &&
  [...document.querySelectorAll('main *')].every((each) =>
    [...each.attributes].every(({ name }) => !/^(on.*|src|style|srcdoc)$/.test(name))) &&
  [...document.querySelectorAll('main a')].every(({ href, rel }) =>
    (!href || /^(https?|mailto):/.test(href)) && rel.includes('noopener'))"""
ENTER, ESCAPE = ("Enter", 13), ("Escape", 27)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def server():
    with running(chat_model(), allows_race=True) as started:
        yield started


@pytest.fixture
def browser(server):
    with closing(Browser()) as opened:
        opened.visit(server.url)
        yield opened
        assert opened.complaints == []
        asked = {url.split("/")[2] for url in opened.requested if url.startswith("http")}
        assert asked == {server.url.split("/")[2]}


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


def say(browser: Browser, text: str) -> None:
    message = {"role": "assistant", "content": text, "pieces": [[text, 1]]}
    browser.value(f"messages = [{{role: 'user', content: 'x'}}, {json.dumps(message)}], draw()")


def test_what_a_model_says_never_becomes_part_of_the_page(browser):
    for text in HOSTILE:
        for cut in sorted({len(text), *range(7, min(len(text), 140), 7)}):  # as it streams in
            say(browser, text[:cut])
            assert browser.value(TAMED), text[:cut]
        for _ in range(2):
            assert browser.value("document.querySelector('.assistant .body').innerText.trim().length > 0")
            browser.click("#colours")
        browser.value("new Promise((done) => setTimeout(done, 50))")
        assert browser.value("document.title") == "medusa", text


def test_markdown_is_shown_and_html_is_shown_as_text(browser):
    say(browser, "# Title\n\n- **a** <b>b</b>\n\n```py\n<i>\n```\n\n| x | y |\n|---|---|\n| 1 | 2 |")
    shown = browser.value("document.querySelector('.assistant .body').innerText")
    assert "<b>b</b>" in shown and "<i>" in shown and "**" not in shown
    tags = ("h1", "li", "strong", "pre > code", "table td")
    assert all(
        browser.value(f"document.querySelectorAll('.assistant .body {tag}').length > 0") for tag in tags
    )


def test_html_that_no_sanitiser_has_seen_is_refused_by_the_page_itself(browser):
    attempt = f'<img src=x onerror="{SET}">'
    refused = browser.value(
        f"(() => {{ try {{ document.body.insertAdjacentHTML('beforeend', {json.dumps(attempt)}); }}"
        " catch (error) { return error.name; } })()"
    )
    assert refused == "TypeError" and browser.value("document.title") == "medusa"


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
    for name in ("marked.umd.js", "purify.min.js"):
        script = httpx.get(f"{server.url}/vendor/{name}")
        assert script.status_code == 200 and script.headers["content-type"].startswith("text/javascript")
        assert script.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{server.url}/vendor/README.md").status_code == 404
