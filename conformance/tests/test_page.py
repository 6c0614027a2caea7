"""The page in a real browser: what a reader sees and can do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("selenium")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from hpcompat_conformance.document import Document
from hpcompat_conformance.rendering import page

WIDE, NARROW = 1280, 390


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    programs = {name: shutil.which(name) or pytest.skip(f"no {name}") for name in ("chromium", "chromedriver")}
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    # Without a sandbox and shared memory, as in a container run by root.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs["chromedriver"]))
    yield driver
    driver.quit()


@pytest.fixture
def at_page(browser: WebDriver, outcome: Document, tmp_path: Path) -> WebDriver:
    """The browser with the page open, on a desktop."""
    path = tmp_path / "page.html"
    path.write_text(page.render(outcome), encoding="utf-8")
    set_width(browser, WIDE)
    browser.get(path.as_uri())
    return browser


def set_width(browser: WebDriver, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def cell(browser: WebDriver, clause: str, implementation: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, f'#{clause} td[data-implementation="{implementation}"]')


def shown(browser: WebDriver) -> list[str]:
    script = (
        "return [...document.querySelectorAll('tr.clause')].filter((row) => row.checkVisibility()).map((row) => row.id)"
    )
    return list(browser.execute_script(script))


def choose(browser: WebDriver, name: str, value: str) -> None:
    Select(browser.find_element(By.ID, f"filter-{name}")).select_by_visible_text(value)


def test_cells_say_the_result(at_page: WebDriver) -> None:
    assert cell(at_page, "ACC-01", "good-one").text == "pass"
    assert cell(at_page, "ACC-01", "bad-one").text == "fail 1/2"
    assert cell(at_page, "ACC-04", "bad-one").text == "not run"
    assert at_page.get_log("browser") == []


def test_a_cell_opens_and_closes_its_failure(at_page: WebDriver) -> None:
    button = cell(at_page, "ACC-01", "bad-one").find_element(By.TAG_NAME, "button")
    detail = at_page.find_element(By.ID, "ACC-01-bad-one")
    assert not detail.is_displayed()
    button.click()
    assert detail.is_displayed()
    assert button.get_attribute("aria-expanded") == "true"
    assert "<w> & more: 1 of 6 elements differ" in detail.text
    assert "m.one on 2 processes" in detail.text
    assert "Traceback" not in detail.text
    detail.find_element(By.TAG_NAME, "summary").click()
    assert "Traceback" in detail.text
    cell(at_page, "ACC-01", "good-one").find_element(By.TAG_NAME, "button").click()
    assert not detail.is_displayed()
    assert at_page.find_element(By.ID, "ACC-01-good-one").is_displayed()


def test_the_keyboard_does_it_too(at_page: WebDriver) -> None:
    button = cell(at_page, "ACC-02", "bad-one").find_element(By.TAG_NAME, "button")
    at_page.execute_script("arguments[0].focus()", button)
    button.send_keys(Keys.ENTER)
    detail = at_page.find_element(By.ID, "ACC-02-bad-one")
    assert "a known gap" in detail.text
    detail.find_element(By.TAG_NAME, "pre").send_keys(Keys.ESCAPE)
    assert not detail.is_displayed()
    assert at_page.switch_to.active_element == button


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"state": "xfail"}, ["ACC-02"]),
        ({"state": "skip"}, ["FUS-01"]),
        ({"state": "pass", "implementation": "bad-one"}, ["ACC-03"]),
        ({"group": "communication fusion"}, ["FUS-01", "FUS-02"]),
        ({"level": "extension", "state": "pass"}, ["FUS-01"]),
    ],
)
def test_filters(at_page: WebDriver, filters: dict[str, str], expected: list[str]) -> None:
    everything = shown(at_page)
    for name, value in filters.items():
        choose(at_page, name, value)
    assert shown(at_page) == expected
    assert at_page.find_element(By.ID, "shown").text == f"{len(expected)} of {len(everything)} clauses"
    at_page.find_element(By.CSS_SELECTOR, "button[type=reset]").click()
    assert shown(at_page) == everything


def test_the_filter_of_text_wants_all_words_of_the_clause(at_page: WebDriver) -> None:
    field = at_page.find_element(By.ID, "filter-text")
    field.send_keys("acc- FOUR-LEAVED")
    assert shown(at_page) == []
    assert at_page.find_element(By.ID, "nothing").is_displayed()
    field.clear()
    field.send_keys("acc-02")
    assert shown(at_page) == ["ACC-02"]
    assert not at_page.find_element(By.ID, "nothing").is_displayed()


def test_the_filter_of_implementations_hides_columns(at_page: WebDriver) -> None:
    choose(at_page, "implementation", "good-one")
    assert cell(at_page, "ACC-01", "good-one").is_displayed()
    assert not cell(at_page, "ACC-01", "bad-one").is_displayed()


def test_a_link_to_a_clause_undoes_the_filters(at_page: WebDriver) -> None:
    choose(at_page, "state", "skip")
    assert "ACC-01" not in shown(at_page)
    at_page.find_element(By.CSS_SELECTOR, '#items a[href="#ACC-01"]').click()
    assert "ACC-01" in shown(at_page)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_nothing_sticks_out_of_the_screen(at_page: WebDriver, width: int) -> None:
    set_width(at_page, width)
    cell(at_page, "ACC-01", "bad-one").find_element(By.TAG_NAME, "button").click()
    assert at_page.execute_script("return document.documentElement.scrollWidth") <= width
    assert cell(at_page, "ACC-01", "bad-one").find_element(By.CLASS_NAME, "label").is_displayed() == (width == NARROW)


# The pairs of colours that carry meaning, in both schemes, as WCAG AA wants them.
CONTRAST = """
const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = (rgb) => rgb.match(/[\\d.]+/g).slice(0, 3).map((c) => channel(+c))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (e) => { for (; e; e = e.parentElement) {
  const color = getComputedStyle(e).backgroundColor;
  if (!/, 0\\)$/.test(color)) return color; } return "rgb(255,255,255)"; };
return [...document.querySelectorAll(".state, .source, .level, .sentence, a, label, h1, dt")].map((e) => {
  const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), e.className || e.tagName]; }).sort((x, y) => x[0] - y[0])[0];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_told_apart(at_page: WebDriver, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    at_page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    worst, what = at_page.execute_script(CONTRAST)
    assert worst >= 4.5, what
    is_dark = at_page.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert is_dark == (scheme == "dark")
