import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from ezpz_obs import write_report

HOSTILE = [
    "<script>alert(1)</script>", "\"quotes\" and 'these'", "$x_2$", "{{7*7}}", "{% raw %}",
    "line\nbreak", "\u202egnirts", "<img src=http://h.invalid/x.png>", "</svg></style>",
    "&lt;b&gt;", "javascript:alert(1)", "x" * 10_000,
]  # fmt: skip
BLUE = {False: (0x00, 0x72, 0xB2), True: (0x56, 0xB4, 0xE9)}


class Reading(HTMLParser):
    """What a browser's parser makes of a page: its elements, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(write_run, records):
    folder = write_run(
        *records(
            range(600),
            loss=lambda n: 2 / (n + 1) ** 0.3, grad_norm=lambda n: 1 + n % 7 / 10,
            mfu=0.4, memory_gib=3.0,
        ),
        {"event": "warning", "time": 1_732_000_001.0, "step": 2, "message": "loss <b>spike</b>"},
        {"event": "end", "time": 1_732_000_900.0, "step": 599, "message": "closed"},
    )  # fmt: skip
    return write_report(folder)[0]


@pytest.fixture
def hostile(write_run, records):
    spread = {f"{HOSTILE[0]}/{part}": 1.0 for part in ("mean", "std", "min", "max")}
    return write_run(
        *records(range(30), **dict.fromkeys(HOSTILE, 1.0), **spread),
        *[
            {"event": name, "time": 1_732_000_001.0, "step": 2, "message": name, name: name}
            for name in HOSTILE
        ],
        {"event": "end", "time": 1_732_000_900.0, "step": 29, "message": HOSTILE[0]},
        run=HOSTILE[0], machine=HOSTILE[7], argv=HOSTILE, hosts=HOSTILE,
        config={name: {name: name} for name in HOSTILE}, versions={HOSTILE[0]: HOSTILE[1]},
        git={"commit": HOSTILE[0], "dirty": False},
    )  # fmt: skip


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_curves_are_seen(page, browser, tmp_path, dark, width):
    picture = tmp_path / "page.png"
    browser(page, f"--screenshot={picture}", width=width, height=2200, dark=dark)
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    assert pixels.shape[1] == width
    paper = pixels[2, 2]
    assert (paper.max() < 60) if dark else (paper.min() > 240)
    blue = np.abs(pixels - BLUE[dark]).sum(-1) < 24
    assert blue.sum() > 1500
    # All across a curve, not in one place.
    assert blue.any(0).sum() > 0.6 * width
    # Text is readable on its ground: its darkest (brightest) are far from the paper.
    assert np.abs(pixels - paper).sum(-1).max() > 500


DRIVE = """<script>{
const svgs = [...document.querySelectorAll("svg[data-curves]")], seen = [];
const svg = svgs.find(each => each.getBoundingClientRect().width);
const at = (kind, part, buttons = 0) => {
  const { left, top, width, height } = svg.getBoundingClientRect();
  const place = { clientX: left + part * width, clientY: top + height / 2, buttons };
  svg.dispatchEvent(new PointerEvent(kind, place));
};
const look = () => {
  at("pointermove", 0.5);
  const [live, over] = [...svg.children].slice(-2), texts = of => [...of.querySelectorAll("text")];
  seen.push([texts(over).map(each => each.textContent), texts(live).map(each => each.textContent)]);
};
const [log, smooth, first] = document.querySelectorAll(".tools input");
const set = (input, field, value) => {
  input[field] = value;
  input.dispatchEvent(new Event("input"));
};
look();
at("pointerdown", 0.4); at("pointermove", 0.6, 1); at("pointerup", 0.6); look();
svg.dispatchEvent(new Event("dblclick")); set(log, "checked", true); look();
set(log, "checked", false); set(smooth, "value", 0.9); look();
set(smooth, "value", 0); set(first, "checked", false); look();
document.title = JSON.stringify(seen);
}</script></body>"""


def test_the_script_shows_values_zooms_smooths_and_hides_runs(write_run, browser, tmp_path):
    runs = []
    for name, factor in ("a", 1.0), ("b", 2.0):
        lines = [
            {"step": n, "time": float(n), "loss": factor * 10.0 ** -(n % 4)} for n in range(101)
        ]
        runs.append(write_run(*lines, folder=name, run=name))
    page = write_report(runs)[0]
    assert 'class="tools' in browser(page, "--dump-dom"), "the page's own policy lets it run"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    (tmp_path / "driven.html").write_text(text.replace("</body>", DRIVE))
    title = re.search("<title>(.*?)</title>", browser(tmp_path / "driven.html", "--dump-dom"))[1]
    still, zoomed, log, smooth, one = json.loads(html.unescape(title))
    said = [value.replace(":", "").split() for value in still[0]]
    step = int(said[0][0])
    assert 40 < step < 60
    assert [(int(n), float(value), run) for n, value, run in said] == [
        (step, 10.0 ** -(step % 4), "a"), (step, 2 * 10.0 ** -(step % 4), "b"),
    ]  # fmt: skip
    assert still[1] == [], "the still picture is what is seen"
    assert all(35 < float(tick) < 65 for tick in zoomed[1][-4:]), "steps"
    assert {"0.001", "0.01", "0.1", "1"} <= set(log[1])
    assert 0.2 < float(smooth[0][0].split()[1]) < 0.4, "the mean of four is 0.278"
    assert [value.split()[-1] for value in one[0]] == ["b"]


def test_a_phone_needs_no_sideways_scrolling(hostile, browser, tmp_path):
    page = write_report(hostile)[0]
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    script = "<script>parent.postMessage(document.documentElement.scrollWidth, '*')</script></body>"
    (tmp_path / "probe.html").write_text(text.replace("</body>", script))
    phone = tmp_path / "phone.html"
    phone.write_text(
        "<script>onmessage = event => document.title = event.data</script>"
        '<iframe src="probe.html" width="360" height="800"></iframe>'
    )
    seen = browser(phone, "--dump-dom", "--virtual-time-budget=5000")
    assert re.search(r"<title>(\d+)", seen)[1] == "360"


def test_hostile_names_are_text(hostile, browser, write_run, records):
    page = write_report(hostile)[0]
    text = page.read_text()
    found = Reading(text)
    assert not {"img", "link", "iframe", "object"} & set(found.tags)
    assert list(found.tags).count("script") == 1, "ours"
    said = "".join(found.text)
    for name in HOSTILE[:-1]:
        assert name.replace("\n", "\\n").replace("\u202e", "\\u202e") in said
    assert "49" not in {part.strip() for part in found.text}
    assert "x" * 500 not in said
    assert any(value == "x" * 10_000 for name, value in found.attributes if name == "title")
    addresses = [
        v for name, v in found.attributes if name in ("href", "src", "xlink:href", "action")
    ]
    assert all(value.startswith("#") for value in addresses), "nothing is asked of any network"
    assert not re.search(r"url\((?!#)|@import|\bfetch\b|\bimport\b|XMLHttpRequest|WebSocket", text)
    assert not any(name.startswith("on") for name, _ in found.attributes)
    seen = Reading(browser(page, "--dump-dom"))  # what Chromium made of it
    made = {"tbody", "label", "input"}  # by Chromium and by our script
    assert sorted(set(seen.tags) - made) == sorted(set(found.tags) - made)
    assert seen.tags.count("svg") == found.tags.count("svg") == len(HOSTILE)


def test_a_page_stands_alone(page):
    text = page.read_text()
    assert "default-src 'none'" in text
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    found = Reading(text)
    pictures = found.tags.count("svg")
    assert pictures == 4
    assert sum(pair == ("role", "img") for pair in found.attributes) == pictures
    assert ("aria-label", "loss over steps") in found.attributes
    assert "loss <b>spike</b>" in "".join(found.text)


def test_of_several_runs_the_curves_are_overlaid(write_run, records):
    runs = [
        write_run(*records(range(50), loss=lambda n, lr=lr: lr * n, epoch=lambda n: n // 10),
                  folder=f"run{number}", run="same")
        for number, lr in enumerate((0.1, 0.2))
    ]  # fmt: skip
    page, markdown, *pictures = write_report(runs)
    assert page == runs[0] / "report" / "report.html"
    assert [picture.name for picture in pictures] == ["curve-loss.svg"], "an epoch only counts"
    found = Reading(page.read_text())
    assert "2 runs" in "".join(found.text)
    assert f"same ({runs[1]})"[:20] in "".join(found.text)
    assert "var(--series-1" in pictures[0].read_text()
    assert markdown.read_text().count("**") == 8
    assert found.tags.count("svg") == 2, "the last of an odd number fills its row, too"
