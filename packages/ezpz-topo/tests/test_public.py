import subprocess
import sys

import ezpz_topo


def test_all_is_what_is_there():
    for name in ezpz_topo.__all__:
        assert getattr(ezpz_topo, name) is not None
    lazy = {*ezpz_topo._LAZY, "__version__"}
    public = {name for name in vars(ezpz_topo) if not name.startswith("_")}
    assert set(ezpz_topo.__all__) == public - {"TYPE_CHECKING", "import_module"} | lazy


def test_names_are_sorted():
    assert list(ezpz_topo.__all__) == sorted(ezpz_topo.__all__, key=_as_ruff_sorts)


def _as_ruff_sorts(name):
    return (not name.isupper(), not name[0].isupper(), name)


def test_only_the_standard_library_is_imported():
    # What the interpreter itself brings (site, .pth files) is there before.
    code = "import sys; before = {*sys.modules}; import ezpz_topo; print(*{*sys.modules} - before)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = {name.partition(".")[0] for name in out.stdout.split()}
    assert brought - sys.stdlib_module_names == {"ezpz_topo"}


def test_family_by_name():
    assert ezpz_topo.family("pmi").rank == ("PMI_RANK",)
    assert [family.name for family in ezpz_topo.FAMILIES][:2] == ["ezpz", "torchrun"]
