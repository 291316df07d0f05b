import pytest

from ezpz_topo import InvalidVariableError
from ezpz_topo._nodelist import tasks_on_node


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3),1", [1, 2, 2, 2, 1]), ("12(x10080)", [12] * 5)],
)
def test_counts_in_order(text, counts):
    assert [tasks_on_node(text, node, variable="V") for node in range(len(counts))] == counts


@pytest.mark.parametrize("text", ["", "x", "4(x2", "4(2)", "4,,3", "4 ", "-1", "4(x2)3"])
def test_malformed_is_refused_with_the_variable(text):
    with pytest.raises(InvalidVariableError, match="SLURM_V="):
        tasks_on_node(text, 9, variable="SLURM_V")


def test_a_node_beyond_the_list():
    with pytest.raises(InvalidVariableError, match="tells of 3 nodes; expected more than 3"):
        tasks_on_node("4(x2),3", 3, variable="V")
