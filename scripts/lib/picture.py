"""Draw docs/assets/terminal.svg and report.svg: what the README's script prints, and its report.

usage: hatch run test:picture [--check]
  --check  run them again; 1 if a picture says anything else, but for numbers and curves

The host's name is drawn as "laptop".
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from html import escape
from pathlib import Path

import fire

ROOT = Path(__file__).resolve().parents[2]
TERMINAL = ROOT / "docs" / "assets" / "terminal.svg"
REPORT = TERMINAL.with_name("report.svg")
COMMANDS = ("ezpz-launch -n 2 python train.py", "ezpz-obs plot outputs/readme loss")
COLUMNS, ROWS, WIDTH, HEIGHT = 80, 24, 8.4, 18  # of the terminal, and of a cell in pixels
REPORT_HIGH = 630
INK = "#d0d0d0"
COLOURS = [  # the eight of a terminal, and the bright ones
    "#5c6370", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d0d0d0",
    "#7f848e", "#ff7b85", "#b5e890", "#ffd68a", "#82c7ff", "#e29bf5", "#7fdbe6", "#ffffff",
]  # fmt: skip
_LOOKS = {1: {"font-weight": "bold"}, 2: {"opacity": "0.6"}}
_LOOKS |= {(30, 90)[n > 7] + n % 8: {"fill": colour} for n, colour in enumerate(COLOURS)}
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m|\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")


def run(command: str, folder: Path) -> list[str]:
    """The lines that a command prints on a terminal of its own, with the escapes of colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "EZPZ_STATE_DIR": str(folder / "state")}
    env |= {"TORCH_DEVICE": "cpu", "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    try:
        while data := os.read(ours, 65536):
            said += data
    except OSError:  # the last who could write has ended
        pass
    os.close(ours)
    if process.wait():
        sys.exit(f"{command}: status {process.returncode}\n{said.decode()}")
    text = said.decode().replace(socket.gethostname(), "laptop").replace("\r\n", "\n")
    return [line.rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]


def pieces(line: str) -> Iterator[tuple[int, str, str]]:
    """Column, text and style of the parts of a line that look alike."""
    style = {"fill": INK}
    column = start = 0
    for match in [*_ESCAPE.finditer(line), None]:
        text = line[start : match.start() if match else len(line)]
        if text.strip():
            yield column, text, ";".join(f"{name}:{value}" for name, value in style.items())
        column += len(text)
        start = match.end() if match else 0
        codes = match[1].split(";") if match and match[1] is not None else []
        for code in (int(each or 0) for each in codes if codes[0] != "38"):  # one of 256 is left
            style = style | _LOOKS.get(code, {}) if code else {"fill": INK}


def svg(lines: list[str]) -> str:
    """The picture of a terminal."""
    columns = max(COLUMNS, *(len(_ESCAPE.sub("", line)) for line in lines))
    wide, high = columns * WIDTH + 24, len(lines) * HEIGHT + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high}" role="img">',
        "<style>text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}</style>",
        f'<rect width="{wide:g}" height="{high}" rx="8" fill="#1e2127"/>',
    ]
    for row, line in enumerate(lines):
        parts += [
            f'<text x="{12 + column * WIDTH:g}" y="{26 + row * HEIGHT}" style="{style}" '
            f'textLength="{len(text) * WIDTH:g}">{escape(text)}</text>'
            for column, text, style in pieces(line)
        ]
    return "\n".join([*parts, "</svg>", ""])


def report(page: str) -> str:
    """The top of a report's page as a picture: its first lines, and its plots side by side."""
    (style,) = re.findall(r"<style>.*?</style>", page, re.DOTALL)
    (top,) = re.findall(r"<header>(.*?)<nav", page, re.DOTALL)
    figures = re.findall(r"<figure[^>]*>.*?</figure>", page, re.DOTALL)
    # What is said below the plots changes from run to run, and the curves are drawn already.
    plots = re.sub(r"<p>.*?</p>|(?<=<svg) data-curves=\"[^\"]*\"", "", "".join(figures))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {REPORT_HIGH}" role="img">'
        f'<foreignObject width="1000" height="{REPORT_HIGH}">'
        f'<body xmlns="http://www.w3.org/1999/xhtml">{style}<main>{top}'
        f'<h2>Curves</h2><div class="plots">{plots}</div></main></body></foreignObject></svg>\n'
    )


def shape(picture: str) -> list[str]:
    """The words of a picture, without numbers, units, curves and spaces."""
    texts = re.findall(r">([^<]+)<", re.sub(r"<style>.*?</style>", "", picture, flags=re.DOTALL))
    words = [re.sub(r"\d[kM]\b|[-\u2212%,\d.\u2800-\u28ff\s]+", " ", t).split() for t in texts]
    return [word for each in words for word in each if word not in ("s", "ms", "µs", "min")]


def draw(*, check: bool = False) -> None:
    """Draw the pictures, or check that they are what the commands print and write now."""
    readme, lines = (ROOT / "README.md").read_text(encoding="utf-8"), []
    (script,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script, encoding="utf-8")
        for command in COMMANDS:
            lines += [f"\x1b[1m$ {command}\x1b[0m", *run(command, Path(folder))]
        run("ezpz-obs report outputs/readme", Path(folder))
        page = Path(folder, "outputs/readme/report/report.html").read_text(encoding="utf-8")
    page = page.replace(socket.gethostname(), "laptop")
    for path, picture in ((TERMINAL, svg(lines)), (REPORT, report(page))):
        if not check:
            path.write_text(picture, encoding="utf-8")
        elif shape(path.read_text(encoding="utf-8")) != shape(picture):
            sys.exit(f"{path.relative_to(ROOT)} is not what is shown now: hatch run test:picture")


if __name__ == "__main__":
    fire.Fire(draw)
