"""The page of ``kvpool serve`` in a real browser, without a screen."""

import re
import shutil

import pytest
from server_process import Server

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def page():
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it drives the browser")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        one = browser.new_page()
        one.faults = []
        one.on("pageerror", lambda error: one.faults.append(str(error)))
        yield one
        browser.close()


def colours(page):
    """The colours of the picture."""
    return page.evaluate(
        """() => { const canvas = document.getElementById("blocks"), found = {};
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < data.length; i += 4) found[data.slice(i, i + 4).join()] = true;
        return Object.keys(found) }"""
    )


def test_page_asks_for_the_key_shows_the_pool_and_tries_a_prompt(page, tmp_path):
    (tmp_path / "keys").write_text("alice 1 mine\n")
    with Server("--num-blocks", "100", "--api-keys", str(tmp_path / "keys")) as server:
        page.goto(server.facts["url"])
        page.fill("#key", "other")
        page.click("#door button")
        page.get_by_text("a key is needed").wait_for()
        page.fill("#key", "mine")
        page.click("#door button")
        page.get_by_text("99 blocks of 16 tokens").wait_for()
        before = colours(page)
        page.fill("#prompt", "Where is token 7? " * 20)
        page.click("#send")
        page.get_by_text("in the answer").wait_for()
        page.locator("#legend").get_by_text(re.compile("cached [1-9]")).wait_for()
        assert page.inner_text("#answer").strip() and "used" not in page.inner_text("#error")
        assert set(colours(page)) > set(before), "cached blocks have a colour of their own"
        assert "mine" not in str(page.evaluate("[{...localStorage}, {...sessionStorage}, document.cookie]"))
        page.reload()
        page.locator("#door").wait_for()  # it has forgotten the key
    assert not page.faults
