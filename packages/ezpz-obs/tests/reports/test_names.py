import pytest

from ezpz_obs._report.words import clean, distinct, file_name, shorten


@pytest.mark.parametrize(
    "text", ["a\nb", "\x1b[31mred", "\u202eright to left", "\u200fmark", "\x00", "a\u2028b"]
)
def test_what_cannot_be_seen_is_written_out(text):
    assert clean(text).isprintable()
    assert "\\" in clean(text)
    assert clean(clean(text)) == clean(text)


def test_other_letters_stay_what_they_are():
    assert clean("Verlust, 損失, خسارة 🎉") == "Verlust, 損失, خسارة 🎉"


def test_both_ends_of_a_long_name_are_shown():
    short = shorten("layer0/" + "x" * 10_000 + "/grad_norm", 60)
    assert len(short) == 60
    assert short.startswith("layer0/")
    assert short.endswith("/grad_norm")


@pytest.mark.parametrize(
    "name", ["a/b", "../../etc/passwd", "A", "loss ", "", ".", "x" * 10_000, "\x00", "損失", "con:"]
)
def test_file_names_are_safe_and_differ(name):
    made = file_name("curve", name)
    assert made.isascii()
    assert len(made) < 64
    assert not set(made) - set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert made != file_name("curve", name + "!")
    assert made != file_name("curve", "loss")


def test_names_that_differ_in_case_have_different_files():
    assert file_name("curve", "loss") != file_name("curve", "Loss").lower()


def test_runs_of_one_name_can_be_told_apart():
    assert distinct(["a", "b"], ["x", "y"]) == ["a", "b"]
    assert distinct(["a", "a"], ["x", "y"]) == ["a (x)", "a (y)"]
    assert len(set(distinct(["a", "a"], ["x", "x"]))) == 2
