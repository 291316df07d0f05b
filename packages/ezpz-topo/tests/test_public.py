import subprocess
import sys

import ezpz_topo


def test_every_name_is_there_and_kept():
    assert len(ezpz_topo.__all__) > 50
    for name in ezpz_topo.__all__:
        value = getattr(ezpz_topo, name)
        assert vars(ezpz_topo)[name] is value
        assert name in dir(ezpz_topo)


def test_importing_it_loads_nothing():
    assert brought("import ezpz_topo") - {"sys"} == {"ezpz_topo", "ezpz_topo._version"}


def test_a_misspelt_name_suggests_the_right_one():
    code = "import ezpz_topo; ezpz_topo.get_rnak"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr.endswith(
        "module 'ezpz_topo' has no attribute 'get_rnak'. Did you mean: 'get_rank'?\n"
    )


def test_only_the_standard_library_is_imported():
    modules = brought("from ezpz_topo import *")
    assert {name.partition(".")[0] for name in modules} - sys.stdlib_module_names == {"ezpz_topo"}


def brought(code):
    # What the interpreter itself brings (site, .pth files) is there before.
    code = f"import sys; before = {{*sys.modules}}; {code}; print(*{{*sys.modules}} - before)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {*out.stdout.split()}
