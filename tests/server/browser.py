"""Chromium without a window, driven over a pair of pipes: no driver, no other package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from tests.patience import tries

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium reads commands from descriptor 3 and answers on 4.
_LAUNCH = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, wanted in zip(high, (3, 4)):
    os.dup2(fd, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab."""

    def __init__(self, executable: str, width: int = 1280, height: int = 860) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out)),
                executable,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--remote-debugging-pipe",
                f"--user-data-dir={self._folder.name}",
                f"--window-size={width},{height}",
                "about:blank",
            ],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in = os.fdopen(ours_in, "rb", buffering=0)
        self._out = os.fdopen(ours_out, "wb", buffering=0)
        self._held = b""
        self._next = 0
        self.problems: list[str] = []
        """What the page's console complained about."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            self._call(f"{domain}.enable")

    # -- what a test does ---------------------------------------------------------------------

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, condition: str) -> Any:
        """Ask the page until it is so."""
        script = f"(() => {{ const v = {condition}; return v instanceof Node || v; }})()"
        for _ in tries():
            if value := self.run(script):
                return value
        raise AssertionError(f"never true: {condition}; console: {self.problems}")

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, "End": 35}
        for kind in ("keyDown", "keyUp"):
            text = "\r" if key == "Enter" and kind == "keyDown" else ""
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                text=text,
                windowsVirtualKeyCode=codes[key],
                modifiers=modifiers,
            )

    def move_to(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def offline(self, off: bool) -> None:
        self._call(
            "Network.emulateNetworkConditions",
            offline=off,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def drop_file(self, name: str, data: bytes) -> None:
        """Drop a file onto the page, as a visitor does."""
        encoded = base64.b64encode(data).decode()
        self.run(
            "(() => { const held = new DataTransfer();"
            f"const bytes = Uint8Array.from(atob('{encoded}'), (c) => c.charCodeAt(0));"
            f"held.items.add(new File([bytes], {json.dumps(name)}));"
            "for (const kind of ['dragenter', 'dragover', 'drop'])"
            "document.body.dispatchEvent(new DragEvent(kind,"
            "{ dataTransfer: held, bubbles: true, cancelable: true })); })()"
        )

    def unnamed(self) -> list[str]:
        """Controls that a screen reader has no name for."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "textbox", "combobox", "checkbox", "slider", "link", "dialog", "image")
        return [
            f"{node['role']['value']} {node.get('properties')}"
            for node in nodes
            if not node["ignored"]
            and node["role"]["value"] in roles
            and not node.get("name", {}).get("value", "").strip()
        ]

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def scheme(self, name: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": name}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    # -- the protocol -------------------------------------------------------------------------

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        number = self._next
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            piece = self._in.read(1 << 16)
            if not piece:
                raise AssertionError("the browser has gone")
            self._held += piece
        line, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return message

    def close(self) -> None:
        self._out.close()
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
