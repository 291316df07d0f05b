"""The former name of `ezpz.DataLoader(one_reader=True)`; the class is tested in ezpz-dist."""

import ezpz
from ezpz.data import DataLoader


def test_it_has_one_reader_unless_told_otherwise(ranks):
    done = ranks(
        2,
        """
        from ezpz.data import DataLoader
        ezpz_dist.setup_torch(tensor_parallel_size=2)
        one, each = DataLoader(range(4), 2), DataLoader(range(4), 2, one_reader=False)
        print(one.is_reader, each.is_reader, [batch.tolist() for batch in one])
        ezpz_dist.cleanup()
        """,
    )
    assert [out.split(maxsplit=2) for out in done] == [
        ["True", "True", "[[0, 1], [2, 3]]\n"], ["False", "True", "[[0, 1], [2, 3]]\n"],
    ]  # fmt: skip
    assert issubclass(DataLoader, ezpz.DataLoader)
