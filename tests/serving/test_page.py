"""The chat page in a real browser, as its users meet it."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial

import httpx
import pytest
from headless_browser import CHROMIUM, Browser
from tiny_chat import chat_model
from tiny_server import expected, running, running_pool

from medusa.serving import answer_streams
from medusa.serving.model_pool import ModelPool, ServedModel
from medusa.serving.service import Service
from medusa.serving.settings import ServiceOptions

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
BY_HAND = """null; window.sent = []; stream = (body, signal, onChunk) => new Promise((end, fail) => {
  sent.push(body.messages.map(({ role, content }) => `${role}: ${content}`).join(', '));
  signal.addEventListener('abort', () => { window.stopped = true; fail(signal.reason); });
  const medusa = (text) => ({ pieces: [[text, 1]], num_tokens: 1, num_steps: 1 });
  const add = (delta, text) => onChunk({ choices: [{ delta, medusa: medusa(text) }] });
  window.say = (text) => add({ content: text }, text);
  window.think = (text) => add({ reasoning_content: text }, text);
  window.end = end; window.breakOff = (why) => fail(new Error(why));
}); null"""
"""The test answers: ``say`` and ``think`` are chunks, ``end`` and ``breakOff`` end it; ``sent`` is what was
asked."""
SHOWN = "document.querySelector('main').innerText"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def server():
    with running(chat_model(), allow_plain=True) as started:
        yield started


@pytest.fixture(scope="module")
def chromium():
    with closing(Browser()) as opened:
        yield opened


@pytest.fixture
def browser(chromium, server):
    chromium.start_anew()
    chromium.visit(server.url)
    yield chromium
    assert chromium.complaints == []
    asked = {url.split("/")[2] for url in chromium.requested if url.startswith("http")}
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


def test_an_answer_can_be_stopped_with_the_keyboard(browser, server, monkeypatch):
    server.slowed(monkeypatch, 0.1)
    browser.value("localStorage.clear(), longest.value = 400, question.focus()")
    browser.type("Hello")
    browser.press(*ENTER)
    browser.until("running && document.querySelector('.assistant .note')?.textContent")
    browser.press(*ESCAPE)
    browser.until("!running && $('status').textContent === 'stopped'")
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


def test_a_race_of_one_token_says_that_it_is_too_short(browser):
    browser.value("localStorage.clear(), longest.value = 1, question.value = 'Hello'")
    browser.click("#race")
    browser.until("!running && document.querySelector('main > p.note')?.textContent")
    verdict = browser.value("document.querySelector('main > p.note').textContent")
    assert verdict == "The same text. They are too short to tell which is faster."


def test_a_failed_side_of_a_race_stops_the_other_and_keeps_the_question(browser):
    browser.value(BY_HAND)
    browser.value("question.value = 'Hello'")
    browser.click("#race")
    browser.value("say('Half'), breakOff('the server is busy')")  # the second side, with heads
    browser.until("!running")
    assert browser.value("stopped")
    assert browser.value("messages.map((each) => each.content)") == ["Hello", "Half"]
    assert browser.value("document.querySelector('.assistant .again').checkVisibility()")


def ask(browser: Browser, text: str) -> None:
    browser.value(f"question.value = {json.dumps(text)}, form.requestSubmit()")
    assert browser.value("Boolean(running)")


@pytest.mark.parametrize(("came", "again"), [("", "Retry"), ("Half an an", "Regenerate")])
def test_a_reload_in_the_middle_keeps_what_was_asked_and_what_came(browser, server, came, again):
    browser.value(BY_HAND)
    ask(browser, "Hello")
    if came:
        browser.value(f"say({came!r})")
    browser.visit(server.url)
    shown = browser.value(SHOWN)
    assert "Hello" in shown and came in shown and again in shown
    assert ("ended early" in shown) == bool(came)
    browser.value(BY_HAND)
    browser.value("[...document.querySelectorAll('.again')].find((each) => each.checkVisibility()).click()")
    browser.value("say('Whole.'), end()")
    answered(browser, 1)
    assert browser.value("[sent, messages.map((each) => each.content)]") == [
        ["user: Hello"],
        ["Hello", "Whole."],
    ]
    assert "ended early" not in browser.value(SHOWN)


def test_an_answer_under_way_is_kept_every_second(browser):
    browser.value(BY_HAND)
    ask(browser, "Hello")
    assert browser.value("JSON.parse(localStorage.getItem(KEPT)).messages[0].content") == "Hello"
    browser.value("say('Half'), saved -= 1001, say(' an')")
    assert "Half an" in browser.value("localStorage.getItem(KEPT)")
    browser.value("end()")


def test_each_tab_keeps_its_own_chat_and_a_new_one_begins_with_the_latest(browser, server):
    browser.value(BY_HAND)
    ask(browser, "First")
    browser.value("say('one'), end()")
    answered(browser, 1)
    first = browser.tab
    browser.open_tab()
    browser.visit(server.url)
    assert browser.value("messages.length") == 2
    browser.click("#new")
    browser.value(BY_HAND)
    ask(browser, "Second")
    browser.value("say('two'), end()")
    answered(browser, 1)
    second = browser.tab
    browser.tab = first
    browser.click("#colours")  # is kept, and with it the chat
    for tab, contents in ((first, ["First", "one"]), (second, ["Second", "two"])):
        browser.tab = tab
        browser.visit(server.url)
        assert browser.value("messages.map((each) => each.content)") == contents


@pytest.mark.parametrize("colours", [False, True])
def test_who_scrolls_up_or_selects_is_left_alone_while_an_answer_comes(browser, colours):
    browser.value(BY_HAND)
    browser.value(f"$('colours').checked = {json.dumps(colours)}")
    ask(browser, "Hello")
    browser.value("say('A **first** paragraph.\\n\\n'), say('line\\n\\n'.repeat(99) + 'The last li')")
    at_end = "log.scrollHeight - log.scrollTop - log.clientHeight < 2"
    browser.until(f"log.scrollHeight > 2 * log.clientHeight && {at_end}")
    browser.value("question.blur()")
    browser.value("getSelection().selectAllChildren(document.querySelector('.assistant .body').firstChild)")
    browser.value("log.scrollTop = 40, new Promise(requestAnimationFrame).then(() => null)")
    selected = browser.value("getSelection().toString()")
    assert "first paragraph" in selected.replace("*", "")
    browser.value("say('ne.\\n\\nMore')")
    browser.value("end()")
    answered(browser, 1)
    assert browser.value("messages[1].content.endsWith('The last line.\\n\\nMore')")
    assert browser.value("[log.scrollTop, getSelection().toString().startsWith('A ')]") == [40, True]


def test_thoughts_are_folded_away_beside_the_answer_and_not_sent_again(browser, server):
    reasoning_tags = "document.querySelector('.assistant details.thought')"
    box = "document.querySelector('.assistant .body')"
    browser.value(BY_HAND)
    ask(browser, "Hello")
    browser.value("think('Hm, <b>bold</b>')")
    assert browser.value("$('status').textContent") == "thinking"
    assert browser.value(f"[{reasoning_tags}.open, {box}.innerText]") == [False, "Thoughts"]
    browser.value(f"{reasoning_tags}.firstChild.click(), new Promise(requestAnimationFrame).then(() => null)")
    browser.value("think(' and so.'), say('Good **day**.')")
    assert browser.value("$('status').textContent") == "answering"
    shown = "Thoughts\nHm, <b>bold</b> and so.\nGood day."
    browser.until(f"{reasoning_tags}.open && {box}.innerText.replace(/\\n+/g, '\\n') === {json.dumps(shown)}")
    browser.value("end()")
    answered(browser, 1)
    assert browser.value("messages[1].content") == "Good **day**."
    browser.visit(server.url)
    assert browser.value(f"{reasoning_tags}.open") is False and browser.value(
        f"{reasoning_tags}.textContent"
    ).endswith("so.")
    browser.value(BY_HAND)
    ask(browser, "Why?")
    assert browser.value("sent") == ["user: Hello, assistant: Good **day**., user: Why?"]
    browser.value("say('So.'), end()")
    answered(browser, 2)
    assert browser.value("document.querySelectorAll('.thought').length") == 1


def test_while_a_long_prompt_is_read_the_page_says_how_far(browser, server, monkeypatch):
    monkeypatch.setattr(answer_streams, "SHOWN_SECONDS", 0.05)
    server.slowed(monkeypatch, 0.3)
    browser.value("longest.value = 20")
    ask(browser, "long " * 40)
    browser.until("/^reading: [1-9]\\d* of 202 tokens$/.test($('status').textContent)")
    browser.until("$('status').textContent === 'answering' && messages[1]?.content")
    browser.press(*ESCAPE)
    browser.until("!running")


@pytest.mark.parametrize("storage", ["full", "forbidden"])
def test_a_chat_that_cannot_be_kept_goes_on_and_says_so(browser, server, storage):
    if storage == "full":
        more = "at.setItem(Math.random(), 'x'.repeat(size))"
        fill = f"let size = 2 ** 22; while (size) try {{ {more} }} catch {{ size >>= 1 }}"
        browser.value(f"for (const at of [localStorage, sessionStorage]) {{ at.clear(); {fill} }}")
    else:
        forbid = (
            "Object.defineProperty(window, name, { get() { throw new DOMException('', 'SecurityError') } })"
        )
        script = f"for (const name of ['localStorage', 'sessionStorage']) {forbid}"
        browser.send("Page.addScriptToEvaluateOnNewDocument", source=script)
    browser.visit(server.url)
    browser.value(BY_HAND)
    ask(browser, "Hello")
    browser.value("say('Good day.'), end()")
    answered(browser, 1)
    assert "not kept" in browser.value("document.querySelector('footer').innerText")
    browser.click("#new")
    assert browser.value("document.querySelectorAll('.message').length") == 0


def test_a_kept_chat_that_cannot_be_read_is_an_empty_one(browser):
    for kept in ("{", "5", "null", '{"messages": 5}', '{"messages": [{"role": "user"}, {"content": "x"}]}'):
        browser.value(f"sessionStorage.clear(), localStorage.setItem(KEPT, {kept!r}), load(), draw()")
        assert browser.value("messages") == []


def test_after_an_error_the_question_waits_with_retry_and_is_not_sent_twice(browser):
    browser.value(BY_HAND)
    ask(browser, "One")
    browser.value("breakOff('the server is busy')")
    browser.until("!running && $('status').textContent === 'the server is busy'")
    browser.click(".user .again")
    browser.value("breakOff('the server is busy')")
    browser.until("!running")
    ask(browser, "Two")
    browser.value("say('Answer'), breakOff('the server is busy')")
    browser.until("!running")
    visible = "[...document.querySelectorAll('.again')].filter((each) => each.checkVisibility())"
    assert browser.value(f"{visible}.map((each) => each.textContent)") == ["Regenerate"]
    assert "not answered" in browser.value(
        "getComputedStyle(document.querySelector('.who'), '::after').content"
    )
    browser.click(".assistant .again")
    browser.value("breakOff('the server is busy')")
    browser.until("!running")
    assert browser.value("messages.map((each) => each.content)") == ["One", "Two", "Answer"]
    ask(browser, "Three")
    assert browser.value("sent") == [
        *["user: One"] * 2,
        *["user: Two"] * 2,
        "user: Two, assistant: Answer, user: Three",
    ]
    browser.value("end()")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("new Response('<h1>Bad gateway</h1>', { status: 502 })", "the server answered with status 502"),
        ("new Response('')", "the server ended the answer early"),
    ],
)
def test_what_is_no_answer_is_an_error(browser, reply, told):
    browser.value(f"fetch = async () => {reply}, null")
    browser.value("question.value = 'Hello', form.requestSubmit()")
    browser.until("!running")
    assert browser.value("$('status').textContent") == told


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


PHONE = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}


def test_on_a_phone_the_log_and_stop_stay_on_the_screen_beside_open_settings(browser):
    browser.send("Emulation.setDeviceMetricsOverride", **PHONE)
    browser.value(BY_HAND)
    browser.value("options.open = true, model.textContent = 'a model with a long name'")
    ask(browser, "Hello")
    browser.value("say('line\\n\\n'.repeat(99))")
    assert browser.value("log.clientHeight") >= 150
    assert browser.value("$('stop').getBoundingClientRect().bottom <= innerHeight && !$('stop').disabled")
    assert browser.value("document.documentElement.scrollHeight <= 640")
    browser.value("key.scrollIntoView(), key.focus()")
    bottom = "options.querySelector('.settings').getBoundingClientRect().bottom"
    assert browser.value(f"key.getBoundingClientRect().bottom <= {bottom} + 1")
    browser.value("end()")


def test_it_fits_a_phone_and_the_dark(browser):
    browser.send("Emulation.setDeviceMetricsOverride", **PHONE)
    light = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.value("document.documentElement.scrollWidth <= 360")
    assert browser.value("getComputedStyle(document.body).backgroundColor") != light


def test_the_page_names_the_model_also_where_a_key_is_wanted(browser):
    browser.until("model.textContent === 'tiny'")
    browser.value(
        "fetch = async (_, { headers }) => headers.Authorization === 'Bearer right'"
        " ? Response.json({ data: [{ id: 'guarded' }] }) : new Response('', { status: 401 }), null"
    )
    for given, told in (("", "wrong: see Settings"), ("right", "guarded"), ("wrong", "wrong: see Settings")):
        browser.value(f"key.value = {given!r}, key.onchange(), null")
        browser.until(f"model.textContent.endsWith({told!r})")


def test_without_javascript_the_page_says_what_it_needs(browser, server):
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    browser.visit(server.url)
    strings = browser.send("DOMSnapshot.captureSnapshot", computedStyles=[])["strings"]
    assert any(text.startswith("This page needs JavaScript") for text in strings)


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


TABLE = (
    "| river | mouth | length | sources |\n|---|---|---|---|\n| Danube | Mediterranean | 2,850 | Germany |\n"
)
LONG = {
    "paragraphs": "Some **bold** text with `code` in it.\n\n" * 600,
    "a nested list": "".join("  " * (at % 8) + "- item\n" for at in range(1800)),
    "a table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 2500,
}


def test_a_table_on_a_phone_keeps_its_words_and_scrolls(browser):
    browser.send("Emulation.setDeviceMetricsOverride", **PHONE)
    say(browser, TABLE)
    line = "parseFloat(getComputedStyle(document.querySelector('td')).lineHeight)"
    assert browser.value(
        f"[...document.querySelectorAll('td')].every((td) => td.clientHeight < 1.8 * {line})"
    )
    assert browser.value("document.documentElement.scrollWidth <= 360 && log.scrollWidth <= log.clientWidth")
    table = "document.querySelector('.body table')"
    assert browser.value(f"{table}.scrollWidth > {table}.clientWidth")


@pytest.mark.parametrize("text", ["```\n" + "x" * 400 + "\n```", TABLE.replace("Danube", "x" * 400)])
def test_what_scrolls_is_reached_by_the_keyboard(browser, text):
    say(browser, text)
    browser.value("document.querySelector('.assistant button').focus()")
    browser.press("Tab", 9)
    assert browser.value("['pre', 'table'].includes(document.activeElement.localName)")


def test_text_that_is_read_from_the_right_begins_there(browser):
    texts = ["مرحبا بالعالم", "שלום עולם", "Hello"]
    for text in texts:
        say(browser, f"{text}\n\n- {text}\n\n> {text}\n\n# {text}\n\n| {text} |\n|---|\n| {text} |")
        directions = browser.value(
            "[...document.querySelectorAll('.assistant .body :is(p, ul, h1, td)')]"
            ".map((each) => getComputedStyle(each).direction)"
        )
        assert set(directions) == {"ltr" if text == "Hello" else "rtl"}
    said = {"role": "assistant", "content": "x", "pieces": [[texts[0], 1]], "thought": texts[1]}
    browser.value(
        f"messages = [{{role: 'user', content: {json.dumps(texts[0])}}}, {json.dumps(said)}], draw()"
    )
    for each in (".user .body", ".thought .raw"):
        assert browser.value(f"getComputedStyle(document.querySelector('{each}')).unicodeBidi") == "plaintext"
    browser.value("$('question').value = messages[0].content")
    assert browser.value("getComputedStyle($('question')).direction") == "rtl"
    say(browser, "- one\n- שלום")
    assert browser.value("log.scrollWidth <= log.clientWidth"), "no mark stands beside the page"


def test_what_is_done_and_what_is_not_look_different(browser):
    say(browser, "- [x] done\n- [ ] open")
    shown = "[...document.querySelectorAll('.assistant li')].map((each) => each.innerText)"
    assert browser.value(shown) == ["☑ done", "☐ open"]


@pytest.mark.parametrize(
    ("kind", "colours"), [*((kind, False) for kind in LONG), ("paragraphs", True)], ids=str
)
def test_a_long_answer_leaves_the_page_time_while_it_comes_and_looks_as_when_it_is_whole(
    browser, kind, colours
):
    browser.value(BY_HAND)
    ask(browser, "Hello")
    browser.value(f"$('colours').checked = {json.dumps(colours)}, window.text = {json.dumps(LONG[kind])}")
    busy = browser.value(
        """new Promise((done) => { let at = 0, busy = 0; const began = performance.now();
        const step = () => {
          const from = performance.now();
          say(text.slice(at, at += 80));
          busy += performance.now() - from;
          if (at < text.length) setTimeout(step, 0); else done(busy / (text.length / 80));
        }; step(); })"""
    )
    assert busy < 60, f"{busy:.0f} ms for each chunk of 80 characters"
    browser.value("end()")
    answered(browser, 1)
    assert browser.value("messages[1].content === text")
    streamed = browser.value("document.querySelector('.assistant .body').innerHTML")
    browser.value("boxes.delete(messages[1]), draw()")
    assert browser.value("document.querySelector('.assistant .body').innerHTML") == streamed


CHANGING = (
    "1. one\n\n2. two\n\npara\n\ntitle\n===\n\n- a\n\n- b\n\n  c\n\n| a |\n|---|\n| 1 |\n\n"
    "```\nx\n\ny\n```\n\n> q\n\nlast\n\n    code\n\nend"
)


def test_blocks_that_later_text_changes_are_drawn_anew(browser):
    browser.value(BY_HAND)
    browser.value(
        """window.plain = (box) => box.innerText.replace(/\\s+/g, ' ').trim();
        window.anew = () => {
          const box = node('div', undefined, 'body'); box.append(markdown(messages[1].content));
          document.body.append(box); const text = plain(box); box.remove(); return text;
        }; null"""
    )
    ask(browser, "Hello")
    for letter in CHANGING:
        browser.value(f"say({json.dumps(letter)})")
        browser.until("plain(document.querySelector('.assistant .body')) === anew()", seconds=10)
    browser.value("end()")


def test_on_the_smallest_screen_the_answers_have_most_of_it(browser):
    browser.send(
        "Emulation.setDeviceMetricsOverride", width=320, height=256, deviceScaleFactor=1, mobile=True
    )
    browser.value("$('race').hidden = true")
    browser.value(BY_HAND)
    ask(browser, "Hello")
    browser.value("say('line\\n\\n'.repeat(40) + 'the last line')")
    browser.until("scrollY > 100")
    assert browser.value("document.documentElement.scrollWidth <= 320")
    assert browser.value("$('form').getBoundingClientRect().top >= 160 && innerHeight === 256")
    last = "document.querySelector('.assistant .body').lastElementChild.getBoundingClientRect()"
    assert browser.value(f"{last}.top > 0 && {last}.bottom <= $('form').getBoundingClientRect().top")
    for each in ("question", "send", "stop"):
        assert browser.value(f"$('{each}').getBoundingClientRect().bottom <= innerHeight")
    browser.value("end()")
    answered(browser, 1)
    assert browser.value("$('form').getBoundingClientRect().top >= 190")


def test_of_several_models_one_is_chosen(chromium):
    def load(name: str, metrics) -> Service:
        options = ServiceOptions(served_model_name=(name,), max_rows=4, chunk=32)
        return Service(chat_model(7 if name == "two" else 0), options, metrics=metrics)

    models = [ServedModel((name,), num_bytes=1, load=partial(load, name)) for name in ("one", "two")]
    with running_pool(ModelPool(models, ServiceOptions(), budget=1)) as (port, _):
        chromium.start_anew()
        chromium.visit(f"http://127.0.0.1:{port}")
        chromium.until("which.options.length === 2 && !which.hidden")
        chromium.value("localStorage.clear(), longest.value = 12, longest.onchange(), null")
        chromium.value("which.value = 'two', question.focus(), null")
        chromium.type("Hello")
        chromium.press(*ENTER)
        answered(chromium, 1)
        question = [{"role": "user", "content": "Hello"}]
        _, text = expected(chat_model(7), question, do_sample=False, max_new_tokens=12)
        assert chromium.value("messages[1].content") == text
