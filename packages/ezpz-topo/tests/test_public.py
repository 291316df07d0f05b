import subprocess
import sys

import ezpz_topo


def test_all_is_what_is_there():
    public = {name for name in vars(ezpz_topo) if not name.startswith("_")} | {"__version__"}
    assert set(ezpz_topo.__all__) == public
    assert list(ezpz_topo.__all__) == sorted(ezpz_topo.__all__, key=_as_ruff_sorts)


def _as_ruff_sorts(name):
    return (not name.isupper(), not name[0].isupper(), name)


def test_only_the_standard_library_is_imported():
    code = "import sys, ezpz_topo; print(*{m.partition('.')[0] for m in sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "mpi4py", "fire", "structlog", "orjson"}
    assert "ezpz_topo" in out.stdout.split()
    assert not heavy & set(out.stdout.split())


def test_family_by_name():
    assert ezpz_topo.family("pmi").rank == ("PMI_RANK",)
    assert [family.name for family in ezpz_topo.FAMILIES][:2] == ["ezpz", "torchrun"]
