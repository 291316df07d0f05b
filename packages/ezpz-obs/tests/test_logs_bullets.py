import io
import json

from ezpz_obs import get_logger, log_dict_as_bulleted_list


def bulleted(*words):
    file = io.StringIO()
    logger = get_logger(env={"EZPZ_LOG_FORMAT": "json"}, file=file)
    log_dict_as_bulleted_list(*words, logger=logger)
    (line,) = file.getvalue().splitlines()
    return json.loads(line)["event"]


def test_nested():
    config = {"lr": 0.1, "model": {"layers": 2, "width": {"inner": 8}}, "empty": {}, 3: "a\nb"}
    assert bulleted(config, "config").splitlines() == [
        "[config]:", "- lr=0.1", "- model:", "  - layers=2", "  - width:", "    - inner=8",
        "- empty={}", "- 3=a", "  b",
    ]  # fmt: skip


def test_without_a_name():
    assert bulleted({"a": ""}) == "[dict]:\n- a="


def test_one_that_holds_itself():
    ring = {"a": {}}
    ring["a"]["b"] = ring
    ring["c"] = ring
    assert bulleted(ring, "ring") == "[ring]:\n- a:\n  - b=...\n- c=..."


def test_this_ranks_logger(capsys):
    log_dict_as_bulleted_list({"a": 1})
    assert "- a=1" in capsys.readouterr().err
