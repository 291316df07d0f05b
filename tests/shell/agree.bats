#!/usr/bin/env bats
# utils.sh and ezpz_topo must not give two answers: names, modules and proxies of machines/*.toml, and
# machine, scheduler, job, nodes and devices for every captured environment. The shell is asked without
# Python on PATH; ezpz_topo is asked afterwards, in one process.

bats_require_minimum_version 1.5.0
load test_helper
load site_helper

setup_file() {
  load test_helper
  load site_helper
  export BIN=$BATS_FILE_TMPDIR/bin
  make_site_bin "$BIN" # with scontrol, which unfolds Slurm's nodelists
}

setup() {
  HOME_DIR=$BATS_TEST_TMPDIR/home VARS=()
  mkdir "$HOME_DIR"
  cd "$BATS_TEST_TMPDIR" || return 1
}

# One line a case: host name|VARIABLE=value|VARIABLE=value... The cases of ezpz-topo's own test_match.py and
# test_allocation.py, and what a real OpenPBS 23.06 and Slurm 22.05.8 set.
cases() {
  local host server
  for host in polaris-login-02 polaris-login-02.hsn.cm.polaris.alcf.anl.gov x3005c0s13b0n0.hsn.cm.polaris.alcf.anl.gov \
    x3200c0s19b1n0.hsn.cm.sirius.alcf.anl.gov sirius-uan-0002 aurora-uan-0010 aurora-uan-0010.hostmgmt1000.cm.aurora.alcf.anl.gov \
    x4102c5s2b0n0.hsn.cm.aurora.alcf.anl.gov x1921c1s2b0n0.hsn.cm.sunspot.alcf.anl.gov sophia-login-01 sophia-pbs-01 \
    sophia-gpu-06.lab.alcf.anl.gov crux-uan-0001.head.cm.crux.alcf.anl.gov crux-login-01 \
    nid001321.chn.perlmutter.nersc.gov frontier00144 login05.frontier.olcf.ornl.gov; do
    printf '%s\n' "$host" "x3005c0s13b0n0|PBS_JOBID=1.pbs-0001|PBS_O_HOST=$host|PBS_NODEFILE=nodes"
  done
  for host in x1000c0s0b1n1 x1921c1s2b0n0 login01 nid001234 x1 my-aurora-uan-0010 frontier frontier-x1 frontier0a \
    notaurora.alcf.anl.gov aurora.alcf.anl.gov.example.org laptop.local POLARIS-LOGIN-02 aurora.alcf.anl.gov; do
    printf '%s\n' "$host"
  done
  for server in 2287864.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov 308834.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov \
    12345.crux-pbs-0001.head.cm.crux.alcf.anl.gov '40[1].crux-pbs-0001.head.cm.crux.alcf.anl.gov' \
    12463902.sunspot-pbs-0001.head.cm.sunspot.alcf.anl.gov 192796.sophia-pbs-01.lab.alcf.anl.gov; do
    printf '%s\n' "x1000c0s0b1n1|PBS_JOBID=$server|PBS_NODEFILE=nodes" \
      "x1000c0s0b1n1|PBS_JOBID=$server|PBS_NODEFILE=nodes|PBS_O_HOST=aurora-uan-0010" \
      "x1000c0s0b1n1|PBS_JOBID=$server|PBS_NODEFILE=nodes|NERSC_HOST=perlmutter"
  done
  cat <<'CASES'
login05|NERSC_HOST=perlmutter
nid001234|NERSC_HOST=perlmutter
box|LMOD_SYSTEM_NAME=frontier
login05|LMOD_SYSTEM_NAME=frontier
box|NERSC_HOST=perlmutter|LMOD_SYSTEM_NAME=frontier
frontier00144|LMOD_SYSTEM_NAME=crusher
frontier00144|NERSC_HOST=perlmutter
nid001234|NERSC_HOST=cori
laptop.local|NERSC_HOST=perlmutter
polaris-login-02.hsn.cm.polaris.alcf.anl.gov|NERSC_HOST=perlmutter
nid001234|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid001234|SLURM_CLUSTER_NAME=perlmutter
frontier00144|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=frontier00144|SLURM_CLUSTER_NAME=frontier
frontier00144|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=frontier00144|SLURM_CLUSTER_NAME=frontier|NERSC_HOST=perlmutter
nid001234|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid001234
nid001234|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid001234|SLURM_CLUSTER_NAME=lumi
nid001234|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid001234|SLURM_CLUSTER_NAME=lumi|NERSC_HOST=perlmutter
login05.frontier.olcf.ornl.gov|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid001234|SLURM_CLUSTER_NAME=lumi
polaris-login-02|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=polaris-login-02
x1000c0s0b1n1|PBS_JOBID=1.pbs-0001|PBS_O_HOST=login01|PBS_NODEFILE=nodes
x1|PBS_JOBID=1.pbs-0001|PBS_NODEFILE=nodes|NERSC_HOST=perlmutter
box|NERSC_HOST=|EZPZ_MACHINE=|SLURM_JOB_ID=|EZPZ_MACHINES=
polaris-login-02|EZPZ_MACHINE=Frontier|NERSC_HOST=perlmutter
box|EZPZ_MACHINE=sunspot
box|EZPZ_MACHINE=generic-slurm
x1|EZPZ_MACHINE=frontier|PBS_JOBID=1.pbs-0001|PBS_NODEFILE=nodes
box|EZPZ_MACHINE=auroa
box|EZPZ_MACHINE=../aurora
box|EZPZ_MACHINE=aurora.toml
x1n0|ENVIRONMENT=BATCH|PBS_ENVIRONMENT=PBS_BATCH|PBS_JOBID=1.pbs-0001|PBS_JOBNAME=probe|PBS_QUEUE=workq|PBS_NODEFILE=nodes|PBS_NODENUM=0|PBS_TASKNUM=1|NCPUS=2|OMP_NUM_THREADS=2|PBS_O_HOST=login1|PBS_O_HOME=/home/alice
x1n0|PBS_ENVIRONMENT=PBS_INTERACTIVE|PBS_JOBID=1.pbs-0001|PBS_NODEFILE=slots|PBS_O_HOST=login1
x1n0|PBS_JOBID=40[1].pbs-0001|PBS_ARRAY_INDEX=1|PBS_ARRAY_ID=40[].pbs-0001|PBS_NODEFILE=40[1].pbs-0001
x1n0|PBS_JOBID=1.pbs-0001|PBS_NODEFILE=odd
x1n0|PBS_JOBID=1.pbs-0001|PBS_NODEFILE=packed
x1n0|PBS_JOBID=1.pbs-0001|PBS_NODEFILE=empty
x1n0|PBS_JOBID=1.pbs-0001|PBS_NODEFILE=missing
x1n0|PBS_JOBID=1.pbs-0001
x1n0|PBS_JOBID=1.pbs-0001|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=a
x1n0|SLURM_JOBID=7
x1n0|SLURM_JOB_NODELIST=nid001
x1n0|PBS_ENVIRONMENT=PBS_BATCH|PBS_NODEFILE=nodes
x1n0|PBS_O_HOST=login1|SLURM_CONF=/etc/slurm.conf
x1n0|LSB_JOBID=5
x1n0|FLUX_JOB_ID=f5
x1n0|COBALT_JOBID=5
nid001|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid[001-004]|SLURM_JOB_NUM_NODES=4|SLURM_NNODES=4|SLURM_NTASKS=8
nid001|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid[001-004]|SLURM_JOB_NUM_NODES=4|SLURM_NTASKS=4|SLURM_PROCID=0|SLURM_LOCALID=0|SLURM_NODEID=0|SLURM_TASKS_PER_NODE=1(x4)
login1|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid[001-002]|SLURM_JOB_NUM_NODES=2|SLURM_STEP_ID=4294967290|SLURM_STEP_NODELIST=nid001|SLURM_STEP_NUM_NODES=1|SLURM_PROCID=0|SLURM_NTASKS=4|SLURM_STEP_NUM_TASKS=1
nid001|SLURM_JOB_ID=7|SLURM_JOB_NODELIST=nid[001-004]|SLURM_JOB_NUM_NODES=4|SLURM_STEP_ID=0|SLURM_STEP_NODELIST=nid[001-002]|SLURM_STEP_NUM_NODES=2|SLURM_STEP_NUM_TASKS=2|SLURM_STEP_TASKS_PER_NODE=1(x2)|SLURM_PROCID=0|SLURM_LOCALID=0|SLURM_NODEID=0
CASES
}

make_node_files() {
  printf '%s\n' x1n0.site.gov x1n1.site.gov >nodes
  printf '%s\n' x1n0.site.gov x1n0.site.gov x1n1.site.gov x1n1.site.gov >slots
  cp slots '40[1].pbs-0001'
  printf 'b.x\r\na.x\r\n\r\nb.x' >odd
  printf '%s\n' x1n0.site.gov X1N0.other.domain >packed
  : >empty
}

# Answers of one function for every case, one a line; "error" where it fails.
ask_shell() { # FUNCTION
  cases >cases.txt
  unshare --uts "$(type -P bash)" -c '
    while IFS="|" read -ra part; do
      hostname "${part[0]}"
      answer=$(env -i HOME="$1" PATH="$2" TMPDIR="$3" "${part[@]:1}" "$4" '"$([ "${SH:-bash}" = bash ] && echo --norc || echo -f)"' -c "
        set -euo pipefail; . \"\$1\"; $5" sh "$6" 2>said </dev/null) || answer=error
      [ "$answer" != error ] || [ -s said ] || answer="silent error"
      printf "%s\n" "$answer"
    done <cases.txt' bash "$HOME_DIR" "$BIN" "$BATS_TEST_TMPDIR" "${SH:-bash}" "$1" "$REPO/utils.sh" >shell.txt
}

# The same of ezpz_topo, by an expression with env and host in it; says where they differ.
agrees() { # EXPRESSION
  topo '
import os, sys
import ezpz_topo
from ezpz_topo import _allocation, _hosts
from ezpz_topo import *
from ezpz_topo._errors import TopoError
host = ""
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("ezpz_topo") and hasattr(module, "get_hostname"):
        module.get_hostname = lambda: host
cases, answers = open("cases.txt").read().splitlines(), open("shell.txt").read().splitlines()
assert len(cases) == len(answers) > 60, (len(cases), len(answers))
wrong = 0
for case, answer in zip(cases, answers):
    host, *variables = case.split("|")
    env = {"HOME": sys.argv[2], "PATH": "/nonexistent", **dict(v.split("=", 1) for v in variables)}
    try:
        expected = str(eval(sys.argv[1]))
    except TopoError as error:
        expected = "error"
    if answer != expected:
        wrong += 1
        print(f"{case}: the shell says {answer}, ezpz_topo {expected}")
sys.exit(wrong > 0)' "$1" "$HOME_DIR"
}

same_machine() {
  need_hostname
  make_node_files
  ask_shell ezpz_get_machine_name
  agrees 'get_machine_info(env, hostname=host).name'
}
@test "bash: the machine's name for every captured environment" { same_machine; }
@test "zsh: the machine's name for every captured environment" { in_zsh same_machine; }

same_scheduler() {
  need_hostname
  make_node_files
  ask_shell ezpz_get_scheduler_type
  # A job of a scheduler that nobody can read is an error to both.
  agrees '(lambda s: s if s in ("pbs", "slurm", "none") else "error")(_allocation.scheduler_of(env))'
}
@test "bash: the scheduler for every captured environment" { same_scheduler; }
@test "zsh: the scheduler for every captured environment" { in_zsh same_scheduler; }

@test "the job's id for every captured environment" {
  need_hostname
  make_node_files
  ask_shell 'ezpz_get_scheduler_type >/dev/null; ezpz_get_job_id || [ "$(ezpz_get_scheduler_type)" = none ]'
  agrees '{"slurm": env.get("SLURM_JOB_ID"), "pbs": env.get("PBS_JOBID"), "none": ""}.get(_allocation.scheduler_of(env)) if _allocation.scheduler_of(env) in ("pbs", "slurm", "none") else "error"'
}

@test "the number of nodes for every captured environment" {
  need_hostname
  make_node_files
  ask_shell ezpz_get_num_nodes
  agrees 'get_allocation(env).num_nodes'
}

@test "the hosts for every captured environment" {
  need_hostname
  make_node_files
  ask_shell 'rm -f hosts.of.job; f=$(ezpz_write_hostfile ./hosts.of.job); tr "\n" " " <"$f"'
  sed -i -e 's/ $//' -e 's/^localhost$/HERE/' shell.txt
  # without a job the one host is this one, by either name
  agrees '(lambda job: " ".join(job.hosts) if job.scheduler != "none" or " ".join(job.hosts) == answer else "HERE")(get_allocation(env))'
}

@test "the devices of a node on every machine's login node" {
  need_hostname
  local name
  topo 'from ezpz_topo import known_machines
for name, machine in known_machines({}).items(): print(name, machine.devices_per_node or 0)' >expected
  [ "$(wc -l <expected)" -ge 11 ]
  while read -r name _; do
    # no device here, and no job: those of the machine's nodes
    VARS=(EZPZ_MACHINE="$name")
    HOST_NAME=login1 here '. "$1"; echo "$EZPZ_MACHINE $(ezpz_get_gpus_per_node)"' "$REPO/utils.sh"
    printf '%s\n' "${lines[-1]}" >>got
  done <expected
  compgen -G '/dev/nvidia[0-9]*' >/dev/null && skip 'this host has devices of its own'
  diff expected got
}

# --- machine files

# What the functions say to `module` and `conda`, which record it.
# shellcheck disable=SC2016
RECORDING='
  module() {
    case $1 in
      use) shift; for word; do echo "use $word" >>"$SAID"; MODULEPATH=$word:$MODULEPATH; done ;;
      load) shift; for word; do echo "load $word" >>"$SAID"; LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$word/1.0; done ;;
      *) return 0 ;;
    esac
    export MODULEPATH LOADEDMODULES
  }
  conda() { echo "conda $*" >>"$SAID"; export CONDA_PREFIX=/x CONDA_DEFAULT_ENV=$2; }'

same_modules() {
  topo 'from ezpz_topo import known_machines
for name, m in known_machines({}).items():
    words = [f"use {p}" for p in m.module_paths] + [f"load {n}" for n in m.modules]
    print(name, *words, *([f"conda activate {m.conda_environment}"] if m.conda_environment else []), sep="|")' >expected
  local line name
  while IFS='|' read -r name _; do
    : >said
    VARS=(EZPZ_MACHINE="$name" SAID="$PWD/said" MODULEPATH=/site/modules)
    here "$RECORDING"'
      set -eu; . "$1"; ezpz_load_modules' "$REPO/utils.sh"
    line=$(tr '\n' '|' <said)
    printf '%s\n' "$name${line:+|}${line%|}" >>got
  done <expected
  diff expected got
  grep -q 'polaris|use /soft/modulefiles|load conda|conda activate base' got
}
@test "bash: each machine's modules are those of its machine file" { same_modules; }
@test "zsh: each machine's modules are those of its machine file" { in_zsh same_modules; }

@test "each machine's proxy is that of its machine file" {
  need_hostname
  topo 'from ezpz_topo import known_machines
for name, m in known_machines({}).items(): print(name, m.proxy or "none")' >expected
  local name
  while read -r name _; do
    # on a compute node, which has no other way out
    case $name in
      perlmutter | frontier | generic-slurm) VARS=(SLURM_JOB_ID=7 SLURM_JOB_NODELIST=x1 SLURM_JOB_NUM_NODES=1 SLURMD_NODENAME=x1) ;;
      workstation) VARS=() ;;
      *) echo x1 >nodes && VARS=(PBS_JOBID=1.pbs PBS_NODEFILE="$PWD/nodes") ;;
    esac
    VARS+=(EZPZ_MACHINE="$name")
    HOST_NAME=x1 here 'set -eu; . "$1"; ezpz_set_proxy >/dev/null || :; echo "$EZPZ_MACHINE ${http_proxy:-none}"' "$REPO/utils.sh"
    printf '%s\n' "${lines[-1]}" >>got
  done <expected
  diff expected got
}
