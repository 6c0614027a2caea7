"""The pictures of the page in the docs: ``python conformance/screenshots.py conformance-out/conformance.html docs``.

Needs chromium, chromedriver, selenium and pillow.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select

SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
GROUP = "reduction"
NUM_COLORS = 64


def main() -> None:
    """Write ``conformance_wide.png`` and ``conformance_narrow.png``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        for name, (width, height) in SIZES.items():
            picture = take(browser, page=args.page.absolute().as_uri(), width=width, height=height)
            picture.quantize(NUM_COLORS).save(args.folder / f"conformance_{name}.png", optimize=True)
    finally:
        browser.quit()


def take(browser: WebDriver, *, page: str, width: int, height: int) -> Image.Image:
    """One group of clauses with the first expected gap in it opened; where that does not fit below the head, from there
    on."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page)
    Select(browser.find_element(By.ID, "filter-group")).select_by_visible_text(GROUP)
    gaps = [cell for cell in browser.find_elements(By.CSS_SELECTOR, "button.xfail") if cell.is_displayed()]
    if gaps:
        gaps[0].click()
        where = "arguments[0].closest('tr').scrollIntoView()" if width < 500 else "scrollTo(0, 0)"
        browser.execute_script(f"{where}; document.activeElement.blur()", gaps[0])
    return Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")


if __name__ == "__main__":
    main()
