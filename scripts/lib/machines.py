"""Write the machines of ezpz_topo/machines/*.toml into utils.sh, which needs no Python for them.

usage: python scripts/lib/machines.py [--check]
exit status: 0; 1 with --check, where utils.sh differs: run it without
"""

import sys
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packages/ezpz-topo/src"))

from ezpz_topo import Machine, known_machines  # noqa: E402

FIRST, LAST = "  command cat <<MACHINES\n", "MACHINES\n"


def words_of(machine: Machine) -> list[str]:
    """Return what utils.sh needs of a machine: how it is matched, its modules and its proxy."""
    rules = tomllib.loads(Path(machine.path).read_text(encoding="utf-8")).get("match", {})
    words = [f"domain={domain}" for domain in rules.pop("domains", [])]
    words += [f"host={name}" for name in rules.pop("hostnames", [])]
    words += [f"{variable}={value}" for variable, value in rules.items()]
    lists = {"use": machine.module_paths, "load": machine.modules}
    lists |= {"conda": [machine.conda_environment], "proxy": [machine.proxy]}
    return words + [f"{key}={','.join(some)}" for key, some in lists.items() if any(some)]


def main() -> int:
    """Write the table, or compare it."""
    path = ROOT / "utils.sh"
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(FIRST)
    after = rest.partition(LAST)[2]
    lines = (
        " ".join([machine.name, machine.scheduler, *words_of(machine)])
        for machine in known_machines({}).values()
        if machine.site != "any"
    )
    # A backslash joins lines in a here-document.
    table = "\n".join(
        " \\\n".join(textwrap.wrap(line, 98, subsequent_indent="  ", break_on_hyphens=False))
        for line in lines
    )
    if {"$", "`", '"', "'"} & set(table):
        sys.exit("a machine's value has a character that a shell would read; expected plain words")
    new = f"{before}{FIRST}{table}\n{LAST}{after}"
    if "--check" not in sys.argv:
        path.write_text(new, encoding="utf-8")
    elif new != text:
        print("utils.sh is not what machines/*.toml say: run python scripts/lib/machines.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
