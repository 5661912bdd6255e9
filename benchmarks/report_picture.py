"""Pictures of reports in the README and on pages: the top of a page, or a chart of it, as headless Chromium draws it.

    trtdet report shapes-int8 eval.json -o report.html
    python benchmarks/report_picture.py report.html docs/report.png
    python benchmarks/report_picture.py proposals.html proposals.png --chart "Accuracy and latency by number"

The bundle and the evaluation of the first are those of docs/report.md. Needs Chromium and the extra ``dev``.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from trtdet.files import write_atomically

WIDTH, HEIGHT = 1240, 800
"""Pixels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="a page of trtdet report")
    parser.add_argument("picture", type=Path, help="the PNG file that is written")
    parser.add_argument("--chart", help="the title of a chart, which alone is drawn")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        parser.error("no Chromium here: install Debian's package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.set_default_timeout(180_000)
        page.goto(options.report.resolve().as_uri())
        page.wait_for_load_state("networkidle")
        if options.chart is not None:
            page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        part = page if options.chart is None else page.locator("figure", has_text=options.chart).last
        if options.chart is not None:
            part.scroll_into_view_if_needed()
            part.locator(".main-svg").first.wait_for()
        write_atomically(options.picture, part.screenshot())
        browser.close()
    print(f"{options.picture}: {options.picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
