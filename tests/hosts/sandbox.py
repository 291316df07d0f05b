"""Two or four hosts on one machine: names, addresses and mounts of their own, and what Hydra needs.

Each host is a network namespace. The bridge between them is in a third one, so that this
machine's own interfaces, routes and packet filters are neither changed nor met, and whatever
range it uses, the hosts' addresses cannot collide with it, nor with another sandbox's.

Verified with iproute2 6.1, util-linux 2.38 and MPICH 5.0.2, as root.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "harness"))  # where no pytest did
from sandboxes import Sandbox, SandboxError, end, search_path

ADDRESSES = {f"node{letter}": f"198.18.0.{n}" for n, letter in enumerate("ABCD", 1)}
"""Of 198.18.0.0/15, which RFC 2544 sets apart for tests."""

_NAMESPACES = Path("/run/netns")
_SWITCH = "switch"

# A launcher's variables, or a scheduler's, would tell of the surroundings of the tests.
_INHERITED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")

# A UTS and a mount namespace for each that enters: a host's name and mounts end with it.
_ENTER = """\
#!/bin/bash
# usage: enter HOST COMMAND...
# The rest runs inside: the names of files, and of the namespace, are known here.
host=$1
inside='hostname "$1" && mount --bind {directory}/hosts /etc/hosts &&
  mount --bind {directory}/"$1" {directory}/local && shift && exec "$@"'
exec ip netns exec {name}-"$host" \\
  unshare --uts --mount --propagation private bash -c "$inside" enter "$@"
"""

# Hydra quotes the path of its proxy for the shell that ssh would start.
_LAUNCHER = """\
#!/bin/bash
# usage: launcher [-OPTION]... HOST WORD...   as ssh does it, also that it keeps no file open
while [[ ${{1-}} == -* ]]; do shift; done
host=$1 && shift
for fd in /proc/self/fd/*; do
  fd=${{fd##*/}}
  ((fd <= 2 || fd == 255)) || exec {{fd}}>&-
done
exec {directory}/enter "$host" bash -c "$*"
"""


class TwoHosts(Sandbox):
    """Two hosts, nodeA and nodeB, that reach each other and nothing else.

    All else is shared: files, processes and their ids, memory. The directory's ``local`` is a
    disk of each host's own: there nodeA sees what is here in ``nodeA``, and nodeB what is in
    ``nodeB``. The environment tells Hydra, too, how to reach a host.
    """

    kind = "hosts"
    names = ("nodeA", "nodeB")

    def run(self, command, *, on="nodeA", **more):
        """Run words on a host, as `Sandbox.run` does."""
        return super().run([str(self.directory / "enter"), on, *command], **more)

    def _end_commands(self):
        _end_processes(self.directory.name)

    def reset(self):
        """Kill every process of both hosts, empty their disks, and bring their links up."""
        _end_processes(self.directory.name)
        for host in self.names:
            self.set_link(host, "up")
            shutil.rmtree(self.directory / host)
            (self.directory / host).mkdir()

    def set_link(self, host, state):
        """Take a host's link ``"down"``, or ``"up"`` again, and wait until the host has seen it."""
        name = self.directory.name
        _ip("-n", f"{name}-{_SWITCH}", "link", "set", host, state)
        # Linux tells of a carrier up to a second later: till then there is "no route to host".
        eth0 = "-n", f"{name}-{host}", "link", "show", "eth0"
        while state == "up" and "state UP" not in _ip(*eth0):
            time.sleep(0.02)

    def _start(self):
        name = self.directory.name
        self.environment = {key: os.environ[key] for key in _INHERITED if key in os.environ} | {
            "PATH": search_path(),
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(self.directory / "launcher"),
        }
        for folder in ("local", *self.names):
            (self.directory / folder).mkdir()
        addresses = {host: ADDRESSES[host] for host in self.names}
        lines = [f"{address} {host}.example {host}\n" for host, address in addresses.items()]
        hosts = self.directory / "hosts"
        hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]), encoding="utf-8")
        for script, text in (("enter", _ENTER), ("launcher", _LAUNCHER)):
            path = self.directory / script
            path.write_text(text.format(directory=self.directory, name=name), encoding="utf-8")
            path.chmod(0o755)

        _ip("netns", "add", f"{name}-{_SWITCH}")
        switch = ("-n", f"{name}-{_SWITCH}", "link")
        _ip(*switch, "add", "bridge", "type", "bridge")
        _ip(*switch, "set", "bridge", "up")
        for host, address in addresses.items():
            node = f"{name}-{host}"
            _ip("netns", "add", node)
            _ip(*switch, "add", host, "type", "veth", "peer", "name", "eth0", "netns", node)
            _ip(*switch, "set", host, "master", "bridge", "up")
            _ip("-n", node, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", node, "link", "set", "eth0", "up")
            _ip("-n", node, "link", "set", "lo", "up")

    def _stop(self):
        try:
            remove(self.directory)
        except KeyboardInterrupt:
            remove(self.directory)
            raise


class FourHosts(TwoHosts):
    """The same with nodeC and nodeD."""

    names = tuple(ADDRESSES)


def remove(directory):
    """Remove the sandbox that has this directory, however far it came to be, or is gone."""
    _end_processes(directory.name)
    # With a namespace its interfaces go.
    for namespace in namespaces(directory):
        _ip("netns", "delete", namespace)
    if directory.exists():
        shutil.rmtree(directory)


def namespaces(directory):
    """Return the names of the network namespaces of the sandbox that has this directory."""
    names = (f"{directory.name}-{each}" for each in (*ADDRESSES, _SWITCH))
    return [name for name in names if (_NAMESPACES / name).exists()]


def missing():
    """Return why there can be no sandbox here; an empty text where there can."""
    commands = ("ip", "unshare", "mount", "hostname", "bash")
    lacking = [name for name in commands if shutil.which(name, path=search_path()) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (Debian: iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "not root: only root makes hosts of namespaces"
    # Inside namespaces that end with it, so that it changes nothing. Quoted: what is needed.
    probe = (
        "mount --bind /etc/hosts /etc/hosts && ip link add bridge type bridge && "
        "ip link add one type veth peer name other && hostname probe && "
        f"ip netns add hosts-{os.getpid()}-probe && ip netns delete hosts-{os.getpid()}-probe"
    )
    apart = ("unshare", "--net", "--uts", "--mount", "--propagation", "private")
    done = _done(*apart, "bash", "-c", probe)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


def _end_processes(name):
    end(lambda: _processes(name), name)


def _processes(name):
    return [
        int(pid)
        for host in ADDRESSES
        if (_NAMESPACES / f"{name}-{host}").exists()
        for pid in _ip("netns", "pids", f"{name}-{host}").split()
    ]


def _ip(*words):
    done = _done("ip", *words)
    if done.returncode:
        raise SandboxError(f"ip {shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _done(*command):
    return subprocess.run(
        command, env={**os.environ, "PATH": search_path()}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
        # Ctrl-C is for the tests: what is begun here is finished, and then taken down.
        start_new_session=True,
    )  # fmt: skip
