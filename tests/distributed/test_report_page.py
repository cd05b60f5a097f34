"""Reports of real runs in a real browser: from ``file://``, with the network off."""

import contextlib
import json
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from browser import CUT, FAINT, WIDER, needs_chromium, opened
from report_runs import train, write_run

from crius import cli
from crius.kernels import choice

pytestmark = [
    pytest.mark.slow,
    needs_chromium,
    pytest.mark.timeout(600),
]

SHORT = ("--training.seq_len", "64", "--batch", "4", "--metrics.log_interval", "1", "--validation.num_samples", "8")

COLOURED = """(card) => {
    const drawn = card.querySelector("canvas"), [r, g, b] = %s;
    const copy = Object.assign(document.createElement("canvas"), {width: drawn.width, height: drawn.height});
    const context = copy.getContext("2d", {willReadFrequently: true});
    context.drawImage(drawn, 0, 0);
    const pixels = context.getImageData(0, 0, copy.width, copy.height).data;
    let found = 0;
    for (let at = 0; at < pixels.length; at += 4) {
        const away = Math.abs(pixels[at] - r) + Math.abs(pixels[at + 1] - g) + Math.abs(pixels[at + 2] - b);
        found += pixels[at + 3] > 200 && away < 40;
    }
    return found;
}"""
LIGHT, DARK, LIGHT_2 = [0x2B, 0x62, 0xD9], [0x7B, 0xA4, 0xFF], [0xD9, 0x66, 0x0F]
"""The colours of the first run, and of the second, in report.css."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run with experts and two validation sets that was killed once, and that skipped a step which was not finite."""
    flags = ["--model.name", "qwen3_moe", "--model.flavor", "debug", "--model.num_layers", "2", "--layout", "fsdp2_ep2"]
    steps = ["--training.steps", "30", "--checkpoint.interval", "10", "--validation.interval", "10"]
    place = tmp_path_factory.mktemp("runs")
    folder = place / "broken"
    parts = {
        "train": list(topics.values()),
        "language": list(topics.values())[:9],
        "code": [Path(re.__file__).read_text()],
    }
    for name, texts in parts.items():
        (place / f"{name}.txt").write_text("\n".join(texts), encoding="utf-8")
    data = ["--data.source", "text", "--data.path", str(place / "train.txt")]
    data += [word for name in ("language", "code") for word in ("--validation.path", f"{name}={place / name}.txt")]
    faults = "kill:step=14,rank=1;nan:step=22"
    return train(folder, *flags, *steps, *data, *SHORT, "--stability.nonfinite", "skip", faults=faults)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """The folder of the runs ``1`` and ``fsdp2``, which differ in nothing else."""
    folder = tmp_path_factory.mktemp("layouts")
    for layout in ("1", "fsdp2"):
        train(folder / layout, "--layout", layout, "--training.steps", "12", "--checkpoint.no_enable", *SHORT)
    return folder


@contextlib.contextmanager
def shown(path, scheme="light", **options):
    """The page of a report, drawn."""
    with opened(path.as_uri(), scheme=scheme, **options) as page:
        page.wait_for_selector("footer")
        yield page


def coloured(page, chart, colour):
    """Pixels of that colour on a chart."""
    return page.locator(f"[data-chart={chart}]").evaluate(COLOURED % colour)


def hover(page, chart, share):
    """Point at a chart, ``share`` of its width from the left."""
    plot = page.locator(f"[data-chart={chart}] .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    return box


def readout(page, chart):
    """Step and values that a chart names."""
    card = page.locator(f"[data-chart={chart}]")
    return card.locator(".at").inner_text(), card.locator(".keys b").all_inner_texts()


def charts(page):
    return [card.get_attribute("data-chart") for card in page.locator("[data-chart]").all()]


@pytest.mark.parametrize(("scheme", "colour"), [("light", LIGHT), ("dark", DARK)])
def test_a_run_that_ended_has_a_report_whose_curves_are_drawn(broken, scheme, colour):
    with shown(broken / "report.html", scheme) as page:
        found = charts(page)
        assert {"loss", "validation", "grad_norm", "lr", "tokens_per_second", "load_max_over_mean", "dead_experts"} <= {
            *found
        }
        assert {name: coloured(page, name, colour) > 50 for name in found} == dict.fromkeys(found, True)
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 23)"
        assert dark == (scheme == "dark")
        page.locator("#theme").click()
        assert coloured(page, "loss", DARK if scheme == "light" else LIGHT) > 50 > coloured(page, "loss", colour)


def test_a_browser_of_the_locale_c_draws_it_too(broken):
    posix = 'Object.defineProperty(navigator, "language", {value: "en-US@posix", configurable: true})'
    with shown(broken / "report.html", script=posix) as page:
        assert coloured(page, "loss", LIGHT) > 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_whole_on_a_phone_and_legible(broken, scheme):
    with shown(broken / "report.html", scheme, width=400) as page:
        assert (page.evaluate(WIDER), page.evaluate(CUT), page.evaluate(FAINT)) == (0, [], [])


def test_it_tells_what_happened(broken):
    with shown(broken / "report.html") as page:
        text = page.locator("main").inner_text()
        assert re.search(r"from step\s+failed in step\s+steps repeated.*\n.*UTC\s+10\s+14\s+3\s", text)
        page.locator("details.incident summary").click()
        assert (
            "step 22 non-finite: skipped" in text and "output.weight" in page.locator("details.incident").inner_text()
        )
        row = page.locator("tr", has_text="stability.nonfinite").locator("td").all_inner_texts()
        assert row == ["stability.nonfinite", "skip", "stop", "command line"]
        for part in ("compute", "planned memory", "hash of the data", "crius train --config"):
            assert part in text


def test_it_shows_what_the_model_says(broken, tmp_path):
    prompts = [word for prompt in ("The ", "<b>") for word in ("--prompt", prompt)]
    with choice.applied(choice.current()):
        assert cli.main(["generate", str(broken), *prompts, "--max_new_tokens", "20", "--device", "cpu"]) == 0
    kept = [json.loads(line) for line in (broken / "samples.jsonl").read_text().splitlines()]
    assert cli.main(["report", str(broken), "--out", str(tmp_path / "said.html")]) == 0
    with shown(tmp_path / "said.html") as page:
        texts = page.locator(".sample pre").evaluate_all("all => all.map(one => one.textContent)")
        assert texts == [one["prompt"] + one["text"] for one in kept] and len(texts) == 2
        assert "step 30 · most probable tokens" in page.locator(".sample figcaption").first.inner_text()


def test_pointing_at_a_chart_shows_its_values(broken):
    records = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    with shown(broken / "report.html") as page:
        last, _ = readout(page, "loss")
        hover(page, "loss", 0.55)
        at, [value] = readout(page, "loss")
        assert last == "last, step 30" and losses[int(re.fullmatch(r"step (\d+)", at)[1])] == pytest.approx(
            float(value), abs=1e-4
        )
        assert readout(page, "lr")[0] == at  # all charts follow
        hover(page, "loss", (22 - 1) / 29)
        assert readout(page, "loss")[0].endswith(" · non-finite: skipped")


def test_a_run_that_ended_earlier_has_no_values_later_and_own_steps_are_named(tmp_path):
    long, short = (
        write_run(tmp_path / name, [3.0 - step / 100 for step in range(count)])
        for name, count in (("long", 100), ("short", 20))
    )
    sparse = write_run(tmp_path / "sparse", [3.0 - step / 100 for step in range(100)])
    lines = (sparse / "metrics.jsonl").read_text().splitlines(keepends=True)
    (sparse / "metrics.jsonl").write_text("".join(lines[9::10]))
    assert cli.main(["report", *map(str, (long, short, sparse)), "--out", str(tmp_path / "three.html")]) == 0
    with shown(tmp_path / "three.html") as page:
        assert readout(page, "loss") == ("last, step 100", ["2.0100", "2.8100 (step 20)", "2.0100"])
        hover(page, "loss", (68 - 1) / 99)
        assert readout(page, "loss") == ("step 68", ["2.3300", "\u2013", "2.3100 (step 70)"])


def test_dragging_zooms_all_charts_and_a_double_click_shows_all_again(broken):
    with shown(broken / "report.html") as page:
        box = hover(page, "loss", 0.4)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=4)
        page.mouse.up()
        hover(page, "lr", 0.99)
        assert 17 <= int(readout(page, "lr")[0].removeprefix("step ")) <= 19
        assert page.locator("#reset").is_visible()
        box = hover(page, "loss", 0.5)
        page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 60)
        hover(page, "lr", 0.99)
        assert readout(page, "lr")[0] == "step 30" and not page.locator("#reset").is_visible()


def test_two_layouts_lie_over_each_other_and_the_page_says_how_far_apart_they_are(layouts, tmp_path):
    out = tmp_path / "both.html"
    assert cli.main(["report", str(layouts / "1"), str(layouts / "fsdp2"), "--out", str(out)]) == 0
    with shown(out) as page:
        assert not page.locator(".verdicts").is_visible()
        page.locator("details.run > summary", has_text="How far apart").click()
        said = page.locator(".verdicts").inner_text()
        assert re.search(
            r"fsdp2 is \d\.\de-\d+ apart from 1: .* over 12 common steps.* No step differs by more than 1e-5", said
        )
        assert coloured(page, "tokens_per_second", LIGHT) > 50 < coloured(page, "tokens_per_second", LIGHT_2)
        assert coloured(page, "apart", LIGHT_2) > 50
        hover(page, "loss", 0.5)
        _, [first, second] = readout(page, "loss")
        assert first == second != "\u2013"
        differences = page.locator("table.differences tbody tr").all_inner_texts()
        assert [row.split() for row in differences] == [["parallelism.data_parallel_shard_degree", "1", "2"]]
        assert page.locator("details.run").count() == 3  # how far apart, and the two runs


def test_a_report_of_several_runs_begins_with_the_best(tmp_path):
    for name, val_loss in (("a", 2.5), ("b", 2.0), ("c", None)):
        run = write_run(tmp_path / name, settings={"optimizer.lr": 0.1 + ord(name)})
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "val_loss": val_loss}) + "\n")
    assert cli.main(["report", *(str(tmp_path / name) for name in "abc"), "--out", str(tmp_path / "all.html")]) == 0
    with shown(tmp_path / "all.html") as page:
        assert page.locator("section h2").first.inner_text() == "Which run is best"
        rows = page.locator("table.ranking tbody tr").all_inner_texts()
        assert [row.split() for row in rows] == [
            ["b", "98.1", "2.0000", "best"],
            ["a", "97.1", "2.5000", "failed"],
            ["c", "99.1", "\u2013", "failed"],
        ]


def test_it_prints_in_light_colours_and_comes_back(broken):
    with shown(broken / "report.html", "dark") as page:
        assert len(page.pdf()) > 50_000
        page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
        assert coloured(page, "loss", DARK) > 50


def test_many_runs_differ_in_colour_or_dashes_and_their_tables_fit_on_paper(tmp_path):
    start = json.dumps({"time": 1.0, "step": 0, "device": "A Processor With A Long Name, 64 cores"}) + "\n"
    runs = [write_run(tmp_path / f"run-{number:02}", files={"starts.jsonl": start}) for number in range(20)]
    (runs[-1] / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 1, "val_loss": null}\n')
    assert cli.main(["report", *map(str, runs), "--out", str(tmp_path / "many.html")]) == 0
    with shown(tmp_path / "many.html") as page:
        keys = page.locator("header .key i").evaluate_all(
            "all => all.map(i => [i.dataset.colour % 8, i.className].join())"
        )
        assert len(set(keys)) == len(keys) == 20
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert "not finite" in page.locator(".verdicts").inner_text()
        page.emulate_media(media="print")
        too_wide = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert page.locator(".scroll").evaluate_all(too_wide) == 0


def test_each_validation_set_has_a_curve_of_its_own(broken):
    with shown(broken / "report.html") as page:
        assert coloured(page, "validation", LIGHT) > 50 < coloured(page, "validation", LIGHT_2)
        keys = page.locator("[data-chart=validation] .key").all_inner_texts()
        assert [key.split()[0] for key in keys] == ["language", "code"]
        assert "validation, code" in page.locator(".tiles").inner_text()


def test_a_hostile_run_is_shown_as_text(tmp_path):
    evil = "</script><script>alert(1)</script><img src=https://example.com/x onerror=alert(2)><!--"
    files = {"incidents/step-2.json": {"step": 2, "kind": evil, "action": evil, evil: evil, "layers": [{evil: evil}]}}
    run = write_run(tmp_path / "<script>alert(3)<!--", settings={"data.path": evil}, starts=(0, 2), files=files)
    assert cli.main(["report", str(run), "--out", str(tmp_path / "out.html")]) == 0
    with shown(tmp_path / "out.html") as page:
        assert page.locator("h1").inner_text() == run.name and page.locator("img").count() == 0
        assert evil in page.locator("details.incident summary").inner_text()
