import io

import pytest

from ezpz_obs import ReportError, plot


def drawn(folder, *names, **options):
    out = io.StringIO()
    plot(folder, *names, file=out, **options)
    return out.getvalue()


def test_a_plot_as_wide_as_asked(write_run, records):
    folder = write_run(*records(range(300), loss=lambda n: 1 / (n + 1), lr=0.1))
    text = drawn(folder, width=72, height=20)
    assert max(map(len, text.splitlines())) <= 72
    assert "\x1b" not in text
    assert any("\u2801" <= letter <= "\u28ff" for letter in text)
    assert "loss: last 0.003333" in text
    assert "lr" not in text


def test_several_metrics_have_a_legend(write_run, records):
    text = drawn(write_run(*records(range(30), a=1.0, b=lambda n: n)), "a", "b", width=80)
    assert "a: last 1" in text
    assert "b: last 29" in text


@pytest.mark.parametrize(
    "values", [[1.0], [2.0] * 20, [1.0, "NaN", 3.0], [1e300, -1e300], [-1e308, 1e308], [1e-320]]
)
def test_any_values(write_run, values):
    lines = [{"step": n, "time": 1.0, "loss": value} for n, value in enumerate(values)]
    assert "loss: last" in drawn(write_run(*lines), width=60)


def test_names_cannot_write_to_the_terminal(write_run, records):
    folder = write_run(*records(range(9), **{"\x1b]0;title\x07loss": 1.0}), run="\x1b[31m\nred")
    text = drawn(folder, width=80)
    assert "\x1b" not in text
    assert "\x07" not in text


def test_refused(write_run, records):
    folder = write_run(*records(range(9), loss=1.0, acc=1.0))
    with pytest.raises(ReportError, match="no metric 'los'; expected one of: loss, acc"):
        drawn(folder, "los")
    with pytest.raises(ReportError, match="no records"):
        drawn(write_run())
    with pytest.raises(ReportError, match="no value is a number"):
        drawn(write_run(*records(range(9), loss="NaN")))
