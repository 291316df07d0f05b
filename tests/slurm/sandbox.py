"""A real Slurm on one machine: a controller and four nodes, all on loopback, all private.

The daemons are children in the foreground, so they are known by process id from their first
moment; nothing is a system service, and nothing outlives the ``with``.

Verified with Slurm 22.05.8 and munge 0.5.15 (Debian 12), as root.
"""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "harness"))  # where no pytest did
from sandboxes import STOP_TIMEOUT, Sandbox, SandboxError, end, search_path
from surroundings import clean
from waiting import PATIENCE

NODES = ("nid001", "nid002", "nid003", "nid004")
CPUS_PER_NODE = 2

START_TIMEOUT = 120.0
"""Seconds until every node must be idle; about 2 here."""

# Below the ephemeral ranges, so that no outgoing connection holds one, and below the ports
# that ezpz_dist derives from a Slurm step.
PORTS = range(10000, 20000)

CONFIGURATION = """\
ClusterName=sandbox
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
# Listen on loopback only.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
# No system facility: no cgroups, no mail, no accounting, no core binding.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{plugins}
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
# The host's own cores and memory do not matter.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
# Only backfill starts heterogeneous jobs, and by default it looks every 30 s.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=1
# Ports are derived from job ids: two sandboxes on one machine should not share them.
FirstJobId={first_job}
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=60 OverSubscribe=YES State=UP
# Jobs in high take the nodes of those in the other two.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=requeued Nodes={names} MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=cancelled Nodes={names} MaxTime=60 PriorityTier=1 PreemptMode=CANCEL State=UP
PartitionName=high Nodes={names} MaxTime=60 PriorityTier=10 PreemptMode=OFF State=UP
"""


# A site's own check of accounts, which needs no accounting; a plugin that Debian brings.
LUA = list(Path("/usr/lib").glob("*/slurm*/job_submit_lua.so"))
REFUSES = """\
function slurm_job_submit(job, partitions, user)
  if job.account ~= "closed" then return slurm.SUCCESS end
  slurm.log_user("account closed has no hours left")
  return slurm.ERROR
end
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
"""

_ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")


class SlurmSandbox(Sandbox):
    """Four nodes, nid001 to nid004, of two cores each; their state and logs are in the folder."""

    kind = "slurm"

    def __init__(self):
        super().__init__()
        self._daemons = {}

    def batch(self, body, *options, env=None, timeout=PATIENCE):
        """Run a batch script to its end, an array's last; a command that fails is an error."""
        descriptor, script = tempfile.mkstemp(suffix=".sh", dir=self.directory)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\nset -e\n{body}\n")
        output = Path(f"{script}.out")
        # Not --wait: it looks after 2 s, and then every 10.
        submit = ["sbatch", "--parsable", f"--output={output}", *options, script]
        job = self.run(submit, env=env).stdout.strip()
        deadline = time.monotonic() + timeout
        facts = ""
        while not _every_task(facts, *_ENDED):
            if time.monotonic() > deadline:
                self._end_commands()
                break
            time.sleep(0.1)
            facts = self._ask("scontrol", "--oneliner", "show", "job", job)
        said = output.read_text(encoding="utf-8") if output.exists() else "(no output file)"
        if not _every_task(facts, "COMPLETED"):
            raise SandboxError(
                f"job {job} did not complete within {timeout:g} s\n{facts}\n"
                f"--- script\n{body}\n--- output\n{said}\n{self._logs()}"
            )
        return said

    def start_again(self, job):
        """Have a job that is being requeued start in seconds, not after Slurm's two minutes."""
        deadline = time.monotonic() + START_TIMEOUT

        def is_requeued():
            told = self._ask("scontrol", "--oneliner", "show", "job", job)
            # When its first run has completed, it gets the time of the next. On a node that was
            # lost it may run on, and what is told of its end would be taken for the second's.
            has_time = "Restarts=1 " in told and " Reason=BeginTime " in told
            return has_time and not running_steps(job)

        self._wait(f"{job} is requeued", is_requeued, deadline)
        # In the second of its end Slurm takes its new credential for the one that it revoked.
        self.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"])

    def make_free(self):
        """Have no job left and every node idle: what a test leaves would keep the next one waiting.

        Jobs that are there are ended, and nodes that are lost come back.
        """
        self._end_commands()
        patience = time.monotonic() + 5.0
        while not self._is_free() and time.monotonic() < patience:
            time.sleep(0.05)
        if not self._is_free():
            # Down, a node forgets its jobs, also one whose end got lost.
            for state in ("down", "idle"):
                nodes = f"nodename={','.join(NODES)}"
                self._ask("scontrol", "update", nodes, f"state={state}", "reason=test")
        deadline = time.monotonic() + START_TIMEOUT
        self._wait("no job is left and every node is idle", self._is_free, deadline)
        # The controller counts anew. It may hold cores of a node for a job that was lost with it,
        # show the node as idle, and start nothing there any more.
        self.run(["scontrol", "reconfigure"])

    def _is_free(self):
        return self._all_idle() and not self._ask("squeue", "--noheader")

    def _start(self):
        # munged wants every user to be able to reach its socket, and only root to write there.
        self.directory.chmod(0o755)
        (self.directory / "state").mkdir(mode=0o700)
        controller_port, *node_ports = free_ports(1 + len(NODES))
        configuration = self.directory / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                directory=self.directory,
                plugins="JobSubmitPlugins=lua" if LUA else "",
                controller_port=controller_port,
                first_job=controller_port * 100,
                names=",".join(NODES),
                nodes="\n".join(
                    f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
                    f"CPUs={CPUS_PER_NODE} Boards=1 SocketsPerBoard=1 "
                    f"CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN"
                    for name, port in zip(NODES, node_ports, strict=True)
                ),
            ),
            encoding="utf-8",
        )
        self.environment = clean(os.environ) | {
            "SLURM_CONF": str(configuration),
            "PATH": search_path(),
            # Gloo and libfabric would choose an interface by the host's name.
            "GLOO_SOCKET_IFNAME": "lo",
            "FI_TCP_IFACE": "lo",
        }
        (self.directory / "job_submit.lua").write_text(REFUSES, encoding="utf-8")
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self._daemon(
            "munged", "munged", "--foreground", "--num-threads=2",
            f"--socket={self.directory}/munge.socket", f"--key-file={key}",
            f"--pid-file={self.directory}/munged.pid", f"--seed-file={self.directory}/munge.seed",
        )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT
        self._wait("munged has a socket", (self.directory / "munge.socket").is_socket, deadline)
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(configuration))
        # A node that finds no controller waits before it tries again.
        self._wait("slurmctld answers", lambda: _listens(controller_port), deadline)
        for name in NODES:
            self._daemon(f"slurmd-{name}", "slurmd", "-D", "-N", name, "-f", str(configuration))
        self._wait("every node is idle", self._all_idle, deadline)

    def _daemon(self, name, *command):
        with (self.directory / f"{name}.out").open("wb") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.directory, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
                # Ctrl-C is for the tests; the daemons are taken down afterwards.
                start_new_session=True,
            )  # fmt: skip

    def _wait(self, what, is_so, deadline):
        while not is_so():
            dead = [
                f"{name} ended with {daemon.returncode}; "
                for name, daemon in self._daemons.items()
                if daemon.poll() is not None
            ]
            if dead or time.monotonic() > deadline:
                raise SandboxError(
                    f"{''.join(dead)}waited up to {START_TIMEOUT:g} s until {what}\n{self._logs()}"
                )
            time.sleep(0.05)

    def _all_idle(self):
        answer = self._ask("sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=all")
        return answer.split("\n") == [f"{name} idle" for name in NODES]

    def _ask(self, *command):
        try:
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=120,
                check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout.strip()

    def _logs(self):
        # A daemon says the same in its log; before there is one, only on its output.
        said = {file.stem: file for suffix in ("out", "log") for file in self._written(suffix)}
        return "\n".join(
            f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-15:])
            for _, file in sorted(said.items())
        )

    def _written(self, suffix):
        return [file for file in self.directory.glob(f"*.{suffix}") if file.stat().st_size]

    def _end_commands(self):
        self._ask("scancel", "--quiet", "--user=root")

    def _stop(self):
        deadline = time.monotonic() + STOP_TIMEOUT
        controller = self._daemons.get("slurmctld")
        if controller is not None and controller.poll() is None:
            # Steps outlive their slurmd: end them while there is one to do it.
            self._end_commands()
            while self._ask("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.05)
        # The nodes first, munged last: an orderly end needs what was started before it.
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        # What a step left: all that runs in the sandbox inherits its SLURM_CONF.
        end(lambda: processes_with(f"SLURM_CONF={self.directory}/slurm.conf"), "the sandbox")
        shutil.rmtree(self.directory)


def reports(directory):
    """Return what each process of a program reported there, in the order of their ranks.

    Files, because launchers mix the output of ranks within a line: srun where a line is
    longer than 1024 bytes, Hydra where its proxies' pieces fall.
    """
    found = [json.loads(file.read_text(encoding="utf-8")) for file in directory.iterdir()]
    return sorted(found, key=lambda report: int(report["rank"]))


def missing(commands=("munged", "slurmctld", "slurmd", "srun")):
    """Return those of the commands that are not installed."""
    return [name for name in commands if shutil.which(name, path=search_path()) is None]


def free_ports(count):
    """Return that many TCP ports on which nothing listens."""
    found = []
    with contextlib.ExitStack() as held:
        for port in random.sample(PORTS, len(PORTS)):
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                # All addresses: a listener on any of them is in the way.
                probe.bind(("", port))
                found.append(port)
            if len(found) == count:
                return found
    raise SandboxError(
        f"only {len(found)} of {count} ports are free from {PORTS[0]} to {PORTS[-1]}"
    )


def running_steps(job):
    """Return the processes of Slurm that still run a step, or the script, of a job."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if (entry / "cmdline").read_bytes().startswith(f"slurmstepd: [{job}.".encode()):
                found.append(int(entry.name))
    return found


def _every_task(facts, *states):
    """Whether there is a job, and each of its tasks (one a line) is in one of the states."""
    tasks = facts.splitlines()
    return bool(tasks) and all(
        any(f" JobState={state} " in task for state in states) for task in tasks
    )


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def processes_with(variable):
    """Return the processes that have this in their environment, such as ``NAME=value``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Gone meanwhile; a zombie has no environment, and is its parent's to collect.
        with contextlib.suppress(OSError):
            if os.fsencode(variable) in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
