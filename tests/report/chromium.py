"""A browser to look at pages with: headless Chromium, spoken to over a pipe in its own protocol.

Nothing but Python's library is needed; `browser.py` is the caller.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Missing(Exception):
    """There is no browser."""


def find():
    """The browser's program: what FLASHCORE_CHROMIUM names, or one on the path."""
    named = os.environ.get("FLASHCORE_CHROMIUM")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        raise Missing(
            f"{named or 'Chromium'} is not there; install it (Debian, Ubuntu: apt-get install chromium) "
            "or set FLASHCORE_CHROMIUM to the program of Chromium or Chrome"
        )
    return found


class Browser:
    """One page of a running browser."""

    def __init__(self):
        program = find()
        self.profile = tempfile.TemporaryDirectory(prefix="flashcore-chromium-", ignore_cleanup_errors=True)
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        # The protocol's descriptors are 3 and 4: the shell puts them there without code between fork and exec.
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"'
        command = ["bash", "-c", script, program, *flags, f"--user-data-dir={self.profile.name}", "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self.pending, self.count, self.session, self.events = b"", 0, None, []
        self.session = self.attach()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)
        os.close(self.read)
        os.close(self.write)
        self.profile.cleanup()

    def attach(self):
        """The session of the first page, as soon as there is one."""
        for _ in range(100):
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next((target["targetId"] for target in targets if target["type"] == "page"), None)
            if page:
                return self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            time.sleep(0.05)
        raise RuntimeError("the browser shows no page")

    def call(self, method, **params):
        """Calls a method of the protocol; events that come meanwhile are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") != self.count:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def receive(self):
        while b"\0" not in self.pending:
            part = os.read(self.read, 1 << 16)
            if not part:
                raise RuntimeError("the browser ended")
            self.pending += part
        message, self.pending = self.pending.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, width, scheme):
        """Shows a file at a width, in `light` or `dark`; returns the addresses that were asked for."""
        # Not as a mobile device: those zoom out until everything fits, and the window would seem as wide as its content.
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self):
        """Errors that the page caused."""
        entries = [event["params"]["entry"] for event in self.events if event.get("method") == "Log.entryAdded"]
        return [entry["text"] for entry in entries if entry["level"] == "error"]

    def ask(self, script):
        """The value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def shoot(self, path):
        """A picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(data))
