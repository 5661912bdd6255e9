"""Reports in a real browser, headless Chromium: no error, nothing loaded, what can be clicked works, what can be seen
can be heard, and paper has all of it."""

import json
import shutil
from pathlib import Path

import pytest
from models import SMALL_MODEL, own_labels
from test_annotation import layers_of
from test_front_page import POINTS, front
from test_report import scores

from trtdet import build, load_config, tune
from trtdet.audit import Audit
from trtdet.bundle import Bundle
from trtdet.demo import shapes
from trtdet.options import BuildOptions, CalibrationOptions, TuneOptions, changed
from trtdet.report import page, report

pytestmark = pytest.mark.slow

PATIENCE = 30_000
"""Milliseconds, for a machine that has much else to do."""

WIDTHS = {"desktop": (1440, 900), "phone": (390, 844), "dark": (1440, 900), "dark phone": (390, 844)}

UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true; })"

PRINT = 1032
"""Pixels between the margins of a sheet of A4 on its side."""


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
def pages(once):
    """A folder with ``runs.html``, a report of a bundle, a tune of earlier times and one of now, and ``six.html``, one
    of six bundles, of which three have an audit and two a score."""

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
        (folder / "runs.html").write_text(page(report(runs)))
        bundles = [shutil.copytree(folder / "b", folder / f"<b>{place}") for place in range(6)]
        for bundle in map(Bundle, bundles[:3]):
            bundle.add("audit.json", Audit(8, 3, 0, tuple(layers_of(bundle)), (), ()).to_json().encode())
        evaluations = [folder / f"eval-{place}.json" for place in range(2)]
        for bundle, evaluation in zip(bundles, evaluations, strict=False):
            evaluation.write_text(json.dumps(scores(bundle)))
        (folder / "six.html").write_text(page(report([*bundles, *evaluations])))

    return once("looked_at", make)


@pytest.fixture(params=[*WIDTHS])
def visit(browser, pages, request):
    """Opens a page, whose errors and requests end the test."""
    width, height = WIDTHS[request.param]
    scheme = "dark" if "dark" in request.param else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    found = context.new_page()
    problems: list[str] = []
    found.on("console", lambda said: problems.append(f"{said.type}: {said.text}"))
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("request", lambda request: problems.append(request.url))

    addresses = set()

    def visited(name: str, unfolded: bool = True):
        addresses.add((pages / name).as_uri())
        found.goto((pages / name).as_uri())
        if unfolded:
            found.evaluate(UNFOLD)
        return found

    yield visited
    assert {line for line in problems if not line.startswith(("data:", "blob:"))} <= addresses
    context.close()


def draw_all(opened) -> int:
    charts = opened.locator(".chart")
    for place in range(charts.count()):
        charts.nth(place).scroll_into_view_if_needed()
        charts.nth(place).locator(".main-svg").first.wait_for()
    return charts.count()


def section_of(opened, run: str, title: str):
    whole = opened.locator(".run", has=opened.get_by_role("heading", name=run, exact=True))
    return whole.locator("details.section", has=opened.get_by_role("heading", name=title, exact=True))


def test_every_chart_is_drawn_inside_the_window(visit):
    opened = visit("runs.html")
    assert draw_all(opened) > 5
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = opened.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ground == ("rgb(20, 24, 30)" if dark else "rgb(255, 255, 255)")


def test_six_bundles_are_seen_at_a_glance(visit):
    opened = visit("six.html", unfolded=False)
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    phone = opened.evaluate("innerWidth < 640")
    assert opened.evaluate("document.documentElement.scrollHeight / innerHeight") < (6 if phone else 4)
    assert opened.locator(".strip svg").count() == 6 and opened.locator(".columns svg").count() == 3
    link = opened.get_by_role("link").nth(4)
    run = opened.locator("details.run").nth(4)
    assert run.locator("summary h2").inner_text() == link.inner_text() and run.get_attribute("open") is None
    link.click()
    assert run.get_attribute("open") is not None


@pytest.mark.parametrize("name", ["runs.html", "six.html"])
def test_axe_finds_nothing(visit, name):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="accessibility is not checked: pip install 'trtdet[dev]'"
    )
    for unfolded in (False, True):
        opened = visit(name, unfolded)
        if unfolded and name == "runs.html":
            draw_all(opened)
        found = axe.Axe().run(opened).response["violations"]
        assert [(one["id"], one["impact"], one["nodes"][0]["html"][:200]) for one in found] == []


def test_paper_has_what_is_folded_in_light_colours(visit):
    opened = visit("runs.html", unfolded=False)
    folded = "document.querySelectorAll('details:not([open])').length"
    closed = opened.evaluate(folded)
    assert closed > 5
    opened.set_viewport_size({"width": PRINT, "height": 700})
    opened.emulate_media(media="print")
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.evaluate(folded) == 0
    drawn = "[...document.querySelectorAll('.chart')].filter(one => !one.querySelector('.main-svg')).length"
    opened.wait_for_function(f"{drawn} === 0")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    wide = "[...document.querySelectorAll('.grid, pre')].filter(one => one.scrollWidth > one.clientWidth + 1)"
    assert opened.evaluate(f"{wide}.map(one => one.textContent.slice(0, 80))") == []
    cut = "[...document.querySelectorAll('.grid, pre')].filter(one => one.scrollHeight > one.clientHeight + 1).length"
    assert opened.evaluate(cut) == 0
    assert opened.locator(".tools").first.is_hidden()
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.evaluate(folded) == closed


def test_tables_filter_and_sort(visit):
    opened = visit("runs.html")
    section = section_of(opened, "b", "Plan")
    rows = section.locator("tbody tr:visible")
    assert rows.count() == 11
    section.get_by_label("runs in").select_option("FP16")
    assert rows.count() == 3
    assert section.locator("output").inner_text() == "3 of 11 rows"
    section.get_by_label("runs in").select_option(index=0)
    section.get_by_label("filter rows").fill("fp16 conv")
    assert 0 < rows.count() <= 3
    section.get_by_label("filter rows").fill("")
    ranked = section_of(opened, "b", "Sensitivity by layer")
    first = ranked.locator("tbody tr").first.locator("td").first
    head = ranked.get_by_role("button", name="rank", exact=True)
    head.focus()
    opened.keyboard.press("Enter")
    assert (first.inner_text(), ranked.locator("th").first.get_attribute("aria-sort")) == ("11", "descending")
    head.click()
    assert first.inner_text() == "1"
    assert opened.locator("th button:empty").count() == 0


def test_charts_zoom_by_keyboard(visit):
    opened = visit("runs.html")
    chart = opened.locator(".chart").and_(opened.get_by_label("From the input, left, to the outputs"))
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
def test_any_histogram_can_be_chosen(visit, run):
    histograms = section_of(visit("runs.html"), run, "Histograms and thresholds")
    histograms.locator("select").select_option(index=2)
    histograms.locator(".one .main-svg").first.wait_for()
    assert histograms.locator(".one figcaption").inner_text() == histograms.locator("select option").nth(2).inner_text()
    if run == "b":
        assert "cut off" in histograms.locator(".one .annotation-text").text_content()
