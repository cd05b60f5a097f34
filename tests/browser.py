"""Pages in a real browser, with the network off."""

import contextlib
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium here")

TEXTS = """() => {
const channels = (colour) => [...colour.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
const over = (front, back) => back.map((value, at) => value * (1 - front[3]) + front[at] * front[3]);
const linear = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const around = (node) => (node ? [node, ...around(node.parentElement)] : []);
const behind = (node) => around(node).reverse()
  .reduce((back, at) => over(channels(getComputedStyle(at).backgroundColor), back), [255, 255, 255]);
const texts = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement;
  const isDrawn = node.checkVisibility({opacityProperty: true, visibilityProperty: true});
  if (text && isDrawn && !node.closest("script, style, noscript, svg")) texts.push([text.slice(0, 60), node]);
}
"""
FAINT = f"""{TEXTS}
  const ratio = (node) => {{
    const back = behind(node), lights = [light(back), light(over(channels(getComputedStyle(node).color), back))];
    return (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
  }};
  return texts.filter(([text, node]) => ratio(node) < 4.5).map(([text]) => text);
}}"""
"""Texts whose contrast is below 4.5 (WCAG 2.2, 1.4.3)."""
CUT = f"""{TEXTS}
  const flow = (at) => getComputedStyle(at).overflowX;
  const hides = (at) => ["hidden", "clip"].includes(flow(at)) && at.scrollWidth > at.clientWidth + 1;
  const cut = ([text, node]) => {{
    const box = node.getBoundingClientRect();
    const first = around(node).find((at) => ["auto", "scroll"].includes(flow(at)) || hides(at));
    if (first) return hides(first) && getComputedStyle(first).textOverflow !== "ellipsis";
    return box.width > 1 && box.left >= 0 && box.right > innerWidth + 1;
  }};
  return texts.filter(cut).map(([text]) => text);
}}"""
"""Texts that end beyond the window or their box, and cannot be scrolled to."""
WIDER = "() => document.documentElement.scrollWidth - innerWidth"
"""Pixels by which the page has to be scrolled sideways."""


@contextlib.contextmanager
def opened(url, *, own="", scheme="light", width=1280, script="", offline=True):
    """A page that must not complain.

    Args:
        url: of the page.
        own: how the address of all that it may ask for begins, which is itself by default.
        scheme: ``light`` or ``dark``.
        width: of the window, in pixels.
        script: run before those of the page.
        offline: the browser has no network.
    """
    from playwright.sync_api import sync_playwright

    said, asked = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(offline=offline, color_scheme=scheme, viewport={"width": width, "height": 900})
        context.add_init_script(script)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        yield page
        browser.close()
    assert said == []
    assert [other for other in asked if not other.startswith(own or url)] == []
