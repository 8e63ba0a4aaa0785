#!/usr/bin/env python3
"""Opens reports in headless Chromium, as phones and desks show them, and fails if anything is missing or out of place.

Usage: browser.py FLASHCORE [--shots FOLDER]

FLASHCORE is the program to test. Pages of kept runs, of runs on this machine and of a hostile run are opened at 360 and
1280 pixels in light and dark; so are the pictures. `measure.js` says what is wrong with what is shown.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import chromium

HERE = pathlib.Path(__file__).resolve().parent
KEPT = HERE.parents[1] / "bench" / "runs"
MEASURE = (HERE / "measure.js").read_text()
EVIL = "\"></td></svg><script>document.title='evil'</script><img src=http://127.0.0.1:9/ onerror=alert(1)>" + "w" * 300


class Workshop:
    """Runs the program in a folder of its own."""

    def __init__(self, program, folder):
        self.program, self.folder = pathlib.Path(program).resolve(), pathlib.Path(folder)

    def run(self, *args):
        done = subprocess.run([self.program, *map(str, args)], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"flashcore {' '.join(map(str, args))} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def report(self, name, *args):
        self.run("report", *args, "--out", f"{name}.html", "--svg", name)
        return self.folder / f"{name}.html", sorted((self.folder / name).glob("*.svg"))

    def bench(self, name, *args):
        self.run("bench", "--backend", "cpu", "--seconds", "0.02", "--peers", "naive", "--out", name, *args)

    def hostile(self, name, source):
        """A run whose texts try to become markup, under many names."""
        run = json.loads((self.folder / source).read_text())
        run["warnings"], run["commit"], run["created"] = [EVIL], EVIL, EVIL
        run["machine"].update(cpu=EVIL, peers=EVIL)
        for n, measurement in enumerate(run["measurements"]):
            measurement["kernel"] = EVIL
            if measurement["arm"] == "naive":
                measurement.update(arm=f"{n}{EVIL}", refused=EVIL if n % 4 else None)
        (self.folder / name).write_text(json.dumps(run))


def pages(shop):
    """Name, page, pictures, and the plots and tables that must be there."""
    for name in ("a.json", "b.json"):
        shop.bench(name, "--suite", "cpu")
    shop.bench("hostile-source.json", "--suite", "cpu", "--filter", "64")
    shop.hostile("evil.json", "hostile-source.json")
    yield "kept", *shop.report("kept", "--dir", KEPT), 60, 20
    yield "here", *shop.report("here", "a.json", "b.json"), 5, 4
    yield "hostile", *shop.report("hostile", "evil.json"), 3, 3


def look(browser, path, width, scheme, shots):
    """Opens a file; returns what was measured, with everything that is wrong."""
    asked = browser.open(path, width, scheme)
    if browser.ask("innerWidth") != width:
        sys.exit(f"error: the browser's window is not {width} wide")
    seen = browser.ask(MEASURE)
    wrong = seen["complaints"] + [f"the browser says: {text}" for text in browser.complaints()]
    wrong += [f"it asked for {address}" for address in asked if address != path.as_uri()]
    if seen["dark"] != (scheme == "dark"):
        wrong.append(f"the paper is {'dark' if seen['dark'] else 'light'}")
    if shots:
        browser.shoot(shots / f"{path.stem}-{width}-{scheme}.png")
    return seen, wrong


def check(browser, shop, shots):
    """Every complaint about every page and picture."""
    complaints = []
    for name, page, pictures, plots, tables in pages(shop):
        for width in (360, 1280):
            for scheme in ("light", "dark"):
                seen, wrong = look(browser, page, width, scheme, shots)
                if seen["plots"] < plots or seen["tables"] < tables:
                    wrong.append(f"only {seen['plots']} plots and {seen['tables']} tables")
                complaints += [f"{name} at {width} in {scheme}: {text}" for text in wrong]
                print(f"{name}: {seen['plots']} plots, {seen['tables']} tables at {width} in {scheme}")
        for picture in pictures:
            for scheme in ("light", "dark"):
                _, wrong = look(browser, picture, 1280, scheme, shots)
                complaints += [f"{picture.name} in {scheme}: {text}" for text in wrong]
        print(f"{name}: {len(pictures)} pictures")
        if not pictures:
            complaints.append(f"{name}: no pictures")
    return complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flashcore", help="the program to test")
    parser.add_argument("--shots", type=pathlib.Path, help="keep pictures of what the browser shows in this folder")
    args = parser.parse_args()
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder, chromium.Browser() as browser:
            complaints = check(browser, Workshop(args.flashcore, folder), args.shots)
    except chromium.Missing as missing:
        sys.exit(f"error: {missing}")
    for complaint in complaints[:40]:
        print(f"error: {complaint[:160]}", file=sys.stderr)
    sys.exit(f"error: {len(complaints)} complaints" if complaints else 0)


if __name__ == "__main__":
    main()
