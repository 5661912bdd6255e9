"""Reports in a real browser, headless Chromium: no error, nothing loaded, and what can be clicked works."""

import json
import shutil
from pathlib import Path

import pytest
from models import SMALL_MODEL, own_labels
from test_front_page import POINTS, front

from trtdet import build, load_config, tune
from trtdet.demo import shapes
from trtdet.options import BuildOptions, CalibrationOptions, TuneOptions, changed
from trtdet.report import page, report

pytestmark = pytest.mark.slow

PATIENCE = 30_000
"""Milliseconds, for a machine that has much else to do."""


@pytest.fixture(scope="module")
def browser():
    """Chromium, which the Makefile installs where it may."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="drives Chromium: pip install 'trtdet[dev]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("reports are not looked at in a browser: no chromium here, install Debian's package of that name")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def html(once):
    """A report of a bundle, a tune of earlier times and one of now."""

    def make(folder: Path) -> None:
        images = shapes.generate(folder, "calibration", 4).images
        calibration = CalibrationOptions(rule="minmax", images=images)
        options = BuildOptions(effort="none", backend="onnxruntime", calibration=calibration)
        ranked = changed(options, keep_fp16=3, rank_images=1, int8_all=True)
        build(SMALL_MODEL, load_config("shapes"), folder / "b", ranked)
        (folder / "tune").mkdir()
        (folder / "tune" / "experiment.json").write_text(json.dumps(front(*POINTS).as_dict()))
        val = shapes.generate(folder, "val", 4)
        scored = changed(options, val_images=val.images, annotations=own_labels(val, folder / "labels.json"))
        settings = changed(TuneOptions(build=scored), rank_images=1, points=2)
        tune(SMALL_MODEL, load_config("shapes"), folder / "tuned", settings)
        runs = [folder / "b", folder / "tune", folder / "tuned"]
        (folder / "report.html").write_text(page(report(runs)))

    return once("looked_at", make) / "report.html"


@pytest.fixture(params=["desktop", "phone", "dark"])
def opened(browser, html, request):
    """The page, whose errors and requests end the test."""
    width, height = (390, 844) if request.param == "phone" else (1280, 900)
    scheme = "dark" if request.param == "dark" else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    found = context.new_page()
    problems: list[str] = []
    found.on("console", lambda said: problems.append(f"{said.type}: {said.text}"))
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("request", lambda request: problems.append(request.url))
    found.goto(html.as_uri())
    yield found
    assert [line for line in problems if not line.startswith(("data:", "blob:"))] == [html.as_uri()]
    context.close()


def test_every_chart_is_drawn_inside_the_window(opened):
    charts = opened.locator(".chart")
    count = charts.count()
    assert count > 5
    for place in range(count):
        charts.nth(place).scroll_into_view_if_needed()
        charts.nth(place).locator(".main-svg").first.wait_for()
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = opened.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ground == ("rgb(20, 24, 30)" if dark else "rgb(255, 255, 255)")


def test_tables_filter_and_sort(opened):
    section = opened.locator("section", has=opened.get_by_role("heading", name="Plan: b"))
    rows = section.locator("tbody tr:visible")
    assert rows.count() == 11
    section.get_by_label("runs in").select_option("FP16")
    assert rows.count() == 3
    assert section.locator("output").inner_text() == "3 of 11 rows"
    section.get_by_label("runs in").select_option(index=0)
    section.get_by_label("filter rows").fill("fp16 conv")
    assert 0 < rows.count() <= 3
    section.get_by_label("filter rows").fill("")
    ranked = opened.locator("section", has=opened.get_by_role("heading", name="Sensitivity by layer: b"))
    first = ranked.locator("tbody tr").first.locator("td").first
    head = ranked.get_by_role("button", name="rank", exact=True)
    head.focus()
    opened.keyboard.press("Enter")
    assert (first.inner_text(), ranked.locator("th").first.get_attribute("aria-sort")) == ("11", "descending")
    head.click()
    assert first.inner_text() == "1"


def test_charts_zoom_by_keyboard(opened):
    chart = opened.locator(".chart", has_text="").and_(opened.get_by_label("From the input, left, to the outputs"))
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for()
    wide = "element => { const [low, high] = element._fullLayout.xaxis.range; return high - low; }"
    before = chart.evaluate(wide)
    chart.focus()
    for _ in range(3):
        opened.keyboard.press("+")
    assert chart.evaluate(wide) == pytest.approx(0.8**3 * before)
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("0")
    assert chart.evaluate(wide) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("run", ["b", "tuned"])
def test_any_histogram_can_be_chosen(opened, run):
    heading = opened.get_by_role("heading", name=f"Histograms and thresholds: {run}", exact=True)
    histograms = opened.locator("section", has=heading)
    histograms.locator("select").select_option(index=2)
    histograms.locator(".one .main-svg").first.wait_for()
    assert histograms.locator(".one figcaption").inner_text() == histograms.locator("select option").nth(2).inner_text()
