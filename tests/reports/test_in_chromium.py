"""A report as a browser shows it, at desktop and phone width, all unfolded: nothing overflows, no text lies over
another, and tables scroll beside their first column.

Chromium opens a copy of the page in a frame of that width, with a script that measures and writes what it finds into
the document. Skips where there is no Chromium."""

import html
import json
import re
import shutil
import subprocess

import pytest
from made_runs import write_comparison, write_run, write_trace
from made_search import SPACE, events_of, write_journal

from hpcdl.reports.report import UNFOLDED, make

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """
<script>
addEventListener("load", () => {
  const wide = innerWidth, found = {wide, scroll: document.documentElement.scrollWidth, beyond: [], over: [], out: []};
  const closed = [...document.querySelectorAll("details:not([open])")];
  found.unfolded = [...document.querySelectorAll("figure")].filter(each => each.checkVisibility()).length;
  for (const each of closed) each.open = true;
  const name = each => each.tagName + " " + (each.textContent || "").trim().slice(0, 40);
  for (const each of document.body.querySelectorAll("*")) {
    const box = each.getBoundingClientRect();
    if (each.closest("svg, .scroll table") || !box.width) continue;
    if (box.right > wide + 0.5 || box.left < -0.5) found.beyond.push(name(each));
  }
  const pictures = [...document.querySelectorAll("figure svg[role=img]")];
  for (const svg of pictures) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(each => [each.textContent, each.getBoundingClientRect()]);
    for (const [said, a] of texts) {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
        found.out.push(svg.getAttribute("aria-label") + ": " + said);
    }
    texts.forEach(([one, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 0.5 && down > 2.5) found.over.push(svg.getAttribute("aria-label") + ": " + one + " and " + other);
    }));
  }
  const blocks = [...document.querySelectorAll("h1, h2, p, figcaption, figure > svg, table, ul.missing")];
  for (let i = 1; i < blocks.length; i++) {
    const a = blocks[i - 1].getBoundingClientRect(), b = blocks[i].getBoundingClientRect();
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 1 && !blocks[i - 1].contains(blocks[i])) found.over.push(name(blocks[i]));
  }
  found.pictures = pictures.length;
  found.moved = [];
  for (const each of document.querySelectorAll(".scroll")) {
    const at = place => each.querySelector(`tbody td:nth-child(${place})`).getBoundingClientRect().left;
    const before = [at(1), at(2)];
    each.scrollLeft = 50;
    found.moved.push([at(1) - before[0], at(2) - before[1], each.scrollLeft]);
  }
  parent.document.getElementById("found").textContent = JSON.stringify(found);
});
</script></body>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def measured(page, width, folder):
    """What the script finds in a page that is so wide."""
    copy = html.escape(page.replace("</body>", MEASURE))
    frame = f'<iframe style="border:0;width:{width}px;height:2000px" srcdoc="{copy}"></iframe><pre id="found"></pre>'
    (folder / "frame.html").write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0">{frame}</body>')
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--window-size=1300,2000", "--dump-dom"]
    command += [f"file://{folder / 'frame.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said and said[1], done.stderr
    return json.loads(html.unescape(said[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of all there is: a comparison with long lines, searches, a pipeline, many ranks, a run without most."""
    folder = tmp_path_factory.mktemp("runs")
    lines = ["train-allreduce", "train-parameter-server --servers 1 --consistency async"]
    lines += ["train-gossip --topology ring"]
    lines += [f"train-local-sgd --sync-every {number}" for number in (2, 4, 8, 16, 32)]
    write_comparison(folder / "compare", lines, seeds=2, failing=(4,))
    pipeline = write_run(folder / "pipeline", strategy="pipeline", steps=3000, seconds=1e5, model=f"mlp:{'64,' * 40}64")
    write_trace(pipeline / "trace.json", microbatches=8)
    write_run(folder / "many", ranks=1000, steps=30, data="/a/very/long/name" * 20)
    write_run(folder / "one", ranks=1, steps=1, evaluations=1)
    write_run(folder / "seven", ranks=7, steps=200_00, evaluations=20)
    write_journal(folder / "search", trials=40, rungs=3, method="asha", seeds=2, failing=(3, 7))
    events = list(events_of(trials=30, space=[*SPACE, "a-" + 30 * "name-", "x=0.001..123456789"]))
    for trial, event in enumerate(event for event in events if event["event"] == "begin"):
        event["values"] |= {"model": f"/a/very/long/path/{'x' * 30}:{trial % 7}", "x": 1e7 * trial}
        event["values"][f"a-{30 * 'name-'}"] = trial
    write_journal(folder / "another-search", events)
    (folder / "bare").mkdir()
    (folder / "bare" / "config.yaml").write_text("data: digits\n")
    make([str(folder)], folder / "report.html")
    return (folder / "report.html").read_text()


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.long), 360])
def test_nothing_overflows_or_overlaps(page, width, tmp_path):
    found = measured(page, width, tmp_path)
    assert found["wide"] == width and found["scroll"] <= width
    assert found["pictures"] == page.count("<figure>") > 100 and found["unfolded"] == UNFOLDED
    assert all(first == 0 and second == -by for first, second, by in found["moved"])
    assert sum(by > 0 for *_, by in found["moved"]) >= (3 if width < 500 else 1)
    assert found["beyond"] == [] and found["out"] == [] and found["over"] == []


def test_what_overflows_or_overlaps_is_found(tmp_path):
    texts = '<text x="1" y="20">one</text><text x="9" y="20">two</text>'
    svg = f'<svg viewBox="0 0 100 50" role="img" aria-label="a">{texts}</svg>'
    long = f'<body><div style="width:700px">x</div><figure><figcaption>t</figcaption>{svg}</figure></body>'
    found = measured(long, 360, tmp_path)
    assert found["scroll"] > 360 and found["beyond"] == ["DIV x"] and found["over"] == ["a: one and two"]
