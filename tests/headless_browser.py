"""A real Chromium without a window, told what to do as its own developer tools tell it, over a pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page, or several in tabs of their own."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Chromium's own helpers may still write there when it has ended.
        self._home = tempfile.TemporaryDirectory(prefix="medusa-browser-", ignore_cleanup_errors=True)
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        command = f"exec {CHROMIUM} {flags} --user-data-dir={self._home.name} about:blank"
        self._process = subprocess.Popen(
            ["bash", "-c", f"{command} 3<&{theirs_in} 4>&{theirs_out}"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self._number, self._rest = 0, b""
        self.tab: str | None = None
        """The tab that is told what to do."""
        self.messages: list[dict[str, Any]] = []
        """Events: requests, what the console said, exceptions."""
        self._context: str | None = None
        self.start_anew()

    def start_anew(self) -> None:
        """Forgets every tab, what they kept and what they said, and opens one tab."""
        self.tab = None
        if self._context is not None:
            self.send("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = self.send("Target.createBrowserContext")["browserContextId"]
        self.messages.clear()
        self.open_tab()

    def open_tab(self) -> None:
        """From now on a new tab is told what to do."""
        self.tab = None
        created = self.send("Target.createTarget", url="about:blank", browserContextId=self._context)
        target = created["targetId"]
        self.tab = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)

    def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        call = {"id": self._number, "method": method, "params": params}
        if self.tab is not None:
            call["sessionId"] = self.tab
        self._out.write(json.dumps(call).encode() + b"\0")
        self._out.flush()
        while True:
            message = self._received()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.messages.append(message)

    def _received(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._in.read1(65536)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def visit(self, url: str) -> None:
        loader = self.send("Page.navigate", url=url)["loaderId"]
        while not any(has_loaded(message, loader) for message in self.messages):
            self.messages.append(self._received())

    def value(self, script: str) -> Any:
        """What ``script`` is in the page, a promise waited for."""
        got = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def until(self, script: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(f"Boolean({script})"):
            assert time.monotonic() < deadline, (
                f"{script} did not come true: {self.value('document.body.innerText')}"
            )
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" else {}
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    @property
    def requested(self) -> list[str]:
        """Every address that the page has asked for."""
        return [
            each["params"]["request"]["url"]
            for each in self.messages
            if each.get("method") == "Network.requestWillBeSent"
        ]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions and what the console called an error."""
        return [
            each
            for each in self.messages
            if each.get("method") == "Runtime.exceptionThrown"
            or (each.get("method") == "Runtime.consoleAPICalled" and each["params"]["type"] == "error")
        ]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._out.close()
        self._in.close()
        self._home.cleanup()


def has_loaded(message: dict[str, Any], loader: str) -> bool:
    """Whether ``message`` says that what ``loader`` loads is there, scripts and all."""
    told = message.get("params", {})
    return told.get("name") == "load" and told.get("loaderId") == loader
