"""One Chromium for all pages: started once in a test run, asked by each module."""

import shutil
import subprocess
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
]
PATIENCE_SECONDS = 60


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """The address at which this run's only Chromium is driven."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        reason = f"no Chromium on this machine (looked for {', '.join(NAMES)})"
        print(reason)
        pytest.skip(reason)
    profile = tmp_path_factory.mktemp("chromium")
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{_port(profile / 'DevToolsActivePort', process)}"
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def _port(file, process):
    """The port that Chromium chose, which it writes down once it listens."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if file.exists() and len(lines := file.read_text().splitlines()) == 2:
            return lines[0]
        time.sleep(0.05)
    raise AssertionError(f"Chromium does not listen (exit status {process.poll()})")


@pytest.fixture(scope="module")
def browser(chromium):
    # Playwright keeps an event loop running while it is open, in which tests that need their own
    # loop fail: so it is opened for a module, and Chromium for all of them.
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.connect_over_cdp(chromium)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens a page and, at the end, checks that it said nothing and asked for nothing."""
    contexts, trouble = [], []

    def open_page(path, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url == path.as_uri() or trouble.append(f"request: {request.url}")
            ),
        )
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []
