"""Every code block of the pages and the READMEs is run, or type-checked; ``blocks`` tells how."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.docs.blocks import PAGES, ROOT, blocks_of, name_of
from tests.docs.python_blocks import (
    BlockError,
    command_before,
    run_before,
    run_in_order,
    sides_of,
)
from tests.docs.shell_blocks import check_syntax, commands_of, problem_of

import ezpz_obs

BLOCKS = {page: blocks_of(page) for page in PAGES}
EVERY = [block for blocks in BLOCKS.values() for block in blocks]
SHELLS = ("bash", "console", "sh")


def pages_with(*languages):
    pages = [page for page in PAGES if any(each.language in languages for each in BLOCKS[page])]
    return pytest.mark.parametrize("page", pages, ids=name_of)


def script_of(block):
    words = (block.marked("ranks") or "").split()
    return (int(words[0]), words[1]) if words else None


def in_order(page):
    python = (block for block in BLOCKS[page] if block.language == "python")
    return [block for block in python if not any(map(block.marked, ("ranks", "given")))]


def output_after(block):
    """The ``text`` that follows a block; a shell may stand between a script and what it prints."""
    blocks = BLOCKS[block.page]
    following = iter(blocks[blocks.index(block) + 1 :])
    after = next(following, None)
    if script_of(block) and after is not None and after.language in SHELLS:
        after = next(following, None) if script_of(block)[1] in after.code else after
    is_output = after is not None and after.language == "text" and not after.marker
    return after.code if is_output else None


def has_lines(printed, expected):
    """Whether ranks printed these lines and no others; lines, and their ends, come in any order."""
    for line in (expected or "").splitlines():
        before, found, after = printed.partition(line)
        if not found:
            return False
        printed = before + after
    return not printed.strip()


def matches(expected, printed):
    """Whether the lines are these, where ``...`` alone on a line stands for any others."""
    parts = re.split(r"^\.\.\.\n", expected.rstrip(), flags=re.MULTILINE)
    pattern = r"(?:.*\n)*?".join(map(re.escape, parts))
    return re.fullmatch(pattern, printed.rstrip()) is not None


@pages_with("python")
def test_python_prints_what_stands_below_it(page, fork_server, tmp_path):
    blocks = in_order(page)
    if not blocks:
        return
    code = [(block.place, block.code) for block in blocks]
    printed = run_in_order(fork_server, code, tmp_path)
    for block, said in zip(blocks, printed, strict=True):
        if (expected := output_after(block)) is not None:
            assert matches(expected, said), f"{block.place} printed\n{said}"
        for comment in re.findall(r"^print\(.*\n((?:#.*\n)+)", block.code, re.MULTILINE):
            assert re.sub(r"^# ?", "", comment, flags=re.MULTILINE) in said, block.place


@pytest.mark.parametrize("block", [*filter(script_of, EVERY)], ids=lambda block: block.place)
def test_scripts_run_on_ranks(block, on_ranks, tmp_path):
    count, name = script_of(block)
    printed = on_ranks(name, block.code, count)
    if (expected := output_after(block)) is not None:
        assert has_lines(printed, expected), f"{block.place} printed\n{printed}"
    # What the page then does with what the script left.
    for shell in BLOCKS[block.page]:
        for words in commands_of(shell.code) if shell.language == "bash" else ():
            if words[0] == "ezpz-obs":
                assert problem_of(words, tmp_path) == "", shell.place


def test_the_twelve_lines_of_the_readme_train(on_ranks, tmp_path):
    """Also on two ranks."""
    code = in_order(ROOT / "README.md")[0].code
    assert len([line for line in code.splitlines() if line.strip()]) == 12
    on_ranks("train.py", code)
    losses = [record["loss"] for record in ezpz_obs.History.read(tmp_path / "outputs" / "readme")]
    assert len(losses) == 200
    assert losses[-1] < losses[0] / 10


@pages_with("diff")
def test_a_few_lines_of_diff_change_a_script_that_runs(page, on_ranks):
    for block in (each for each in BLOCKS[page] if each.language == "diff"):
        before, after, added = sides_of(block.code)
        compile(before, block.place, "exec")
        assert added <= 5, f"{block.place}: {added} lines are added; five are promised"
        expected = output_after(block)
        assert has_lines(on_ranks("train.py", after), expected), block.place


@pages_with("diff")
def test_the_script_before_a_diff_runs_and_prints_the_same(page, tmp_path):
    shells = [each.code for each in BLOCKS[page] if each.language == "bash"]
    words = next(filter(None, map(command_before, shells)))
    for block in (each for each in BLOCKS[page] if each.language == "diff"):
        before, _, _ = sides_of(block.code)
        printed = run_before(words, before, tmp_path)
        if printed is None:
            pytest.skip(f"{words[0]} is not started here: {block.place} is compiled only")
        assert has_lines(printed, output_after(block)), f"{block.place} printed\n{printed}"


@pages_with(*SHELLS)
def test_every_command_is_known_and_its_options_are_there(page, tmp_path):
    for block in (each for each in BLOCKS[page] if each.language in SHELLS):
        if block.language != "console":
            assert check_syntax(block.code) == "", block.place
        for words in commands_of(block.code, console=block.language == "console"):
            problem = problem_of(words, tmp_path)
            assert not problem, f"{block.place}: {' '.join(words)}: {problem}"


def test_what_is_not_run_is_type_checked(tmp_path):
    checked = 0
    for block in EVERY:
        given = block.marked("given")
        assert given or block.language != "py", f"{block.place}: py needs <!-- given: ... -->"
        if given:
            checked += 1
            name = re.sub(r"\W", "_", name_of(block.page))
            (tmp_path / f"{name}_{block.line}.py").write_text(f"{given}\n{block.code}")
    assert checked
    done = subprocess.run(
        [Path(sys.executable).with_name("pyright"), "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == checked
    assert report["generalDiagnostics"] == []


def test_a_text_is_something_that_is_printed():
    for blocks in BLOCKS.values():
        for before, block in zip([None, *blocks], blocks, strict=False):
            if block.language != "text" or block.marker:
                continue
            assert before is not None, f"{block.place}: what prints it?"
            shown = before.language in ("python", "diff") or any(
                output_after(each) == block.code for each in blocks if script_of(each)
            )
            assert shown, f"{block.place}: what prints it? If nothing does, mark it"


def texts_of(folder):
    """Every string of the Python files under a folder, with ``…`` for what is put into it."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "…") for part in node.values)
                yield "".join(part if isinstance(part, str) else "…" for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def missing(message, texts):
    """The fixed parts of a message that no text has; ``…`` stands where a text goes on."""
    parts = [part.strip(" ;,.:()") for part in message.replace("\n", " ").split("…")]
    return [part for part in parts if part and not any(part in text for text in texts)]


def test_messages_are_those_of_the_sources():
    ours = [text for path in ROOT.glob("packages/*/src") for text in texts_of(path)]
    torch = Path(importlib.util.find_spec("torch").origin).parent  # not imported: it takes seconds
    theirs = list(texts_of(torch / "nn" / "parallel"))
    quoted = [block for block in EVERY if block.marked("message") is not None]
    assert len(quoted) > 20
    for block in quoted:
        lacking = missing(block.code, theirs if block.marked("message") == "torch" else ours)
        assert not lacking, f"{block.place}: nobody says {lacking}"


def test_every_block_is_of_a_kind_that_is_checked():
    known = {"python", "py", "text", "diff", "toml", "markdown", *SHELLS}
    markers = ("ranks", "given", "message", "drawing")
    for block in EVERY:
        assert block.language in known, f"{block.place}: {block.language!r}"
        if block.language == "toml":
            tomllib.loads(block.code)
        if block.marker:
            assert any(block.marked(kind) is not None for kind in markers), block.place


def test_a_wrong_page_is_seen(fork_server, on_ranks, tmp_path):
    """The checks above find what they are for."""
    with pytest.raises(BlockError, match="ZeroDivisionError"):
        run_in_order(fork_server, [("x.md:1", "1 / 0")], tmp_path)
    with pytest.raises(AssertionError, match="rank 0 ended with 3"):
        on_ranks("x.py", "raise SystemExit(3)", 1)
    assert problem_of(["ezpz-launch", "--procs", "2", "python"], tmp_path)
    assert problem_of(["pip", "install", "ezpz-suite[nothing]"], tmp_path)
    assert problem_of(["frobnicate"], tmp_path)
    assert run_before(["frobnicate", "train.py"], "", tmp_path) is None
    assert problem_of(["python", "-m", "ezpz.examples.nothing"], tmp_path)
    assert check_syntax("if true; then")
    assert missing("no … on PATH", ("no … on PATHS",)) == []
    assert missing("nothing … on PATH", ("no … on PATH",)) == ["nothing"]
    assert has_lines("a\n\nb\n", "b\na\n")
    assert not has_lines("a\nb\nc\n", "b\na\n")
    assert not has_lines("a\n", "b\na\n")
    assert not matches("a\nb", "a\nc")
    assert matches("a\n...\nb", "a\nx\ny\nb\n")
