import os

import pytest

from ezpz_launch._errors import CommandNotExecutableError, CommandNotFoundError
from ezpz_launch._identify import require_command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, mode in (("program", 0o755), ("train.py", 0o644), ("data", 0o644)):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_can_be_executed(folder):
    env = {"PATH": os.pathsep.join(["/absent", str(folder)])}
    require_command("program", env)
    require_command("./program", {})
    require_command(str(folder / "program"), {})


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("absent", "'absent': not found on PATH"),
        ("/absent/x", "'/absent/x': no such file"),
        ("", "'': not found on PATH"),
        ("program", "'program': not found on PATH; try: ezpz-launch ./program"),
        ("train.py", "'train.py': not found on PATH; try: ezpz-launch python train.py"),
    ],
)
def test_what_is_not_there(folder, program, text):
    with pytest.raises(CommandNotFoundError) as caught:
        require_command(program, {"PATH": "/absent"})
    assert (str(caught.value), caught.value.exit_status) == (text, 127)


@pytest.mark.parametrize("program", ["./absent", "folder/train.py"])
def test_where_a_relative_path_is_looked_for(folder, program):
    (folder / "elsewhere" / "folder").mkdir(parents=True)
    (folder / "elsewhere" / "folder" / "train.py").touch()
    submitted = {"PBS_O_WORKDIR": str(folder / "elsewhere")}
    hint = "give its path from there, or a whole one"
    if program == "folder/train.py":
        hint = f"try: cd {folder}/elsewhere"
    with pytest.raises(CommandNotFoundError) as caught:
        require_command(program, submitted)
    assert str(caught.value) == f"{program!r}: no such file in {folder}; {hint}"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("./train.py", "./train.py is not executable; try: ezpz-launch python ./train.py"),
        ("./data", "./data is not executable; try: chmod +x ./data"),
    ],
)
def test_what_cannot_be_executed(folder, program, text):
    with pytest.raises(CommandNotExecutableError) as caught:
        require_command(program, {})
    assert (str(caught.value), caught.value.exit_status) == (text, 126)


def test_the_first_that_can_be_executed_counts(folder):
    (folder / "folder" / "data").write_text("")
    (folder / "folder" / "data").chmod(0o755)
    require_command("data", {"PATH": os.pathsep.join([str(folder), str(folder / "folder")])})
