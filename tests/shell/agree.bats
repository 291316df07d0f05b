#!/usr/bin/env bats
# utils.sh and ezpz_topo must not give two answers: names, modules and proxies of machines/*.toml, and
# machine, scheduler, job, nodes and devices for every captured environment. The shell is asked without
# Python on PATH; ezpz_topo is asked afterwards, in one process.

bats_require_minimum_version 1.5.0
load test_helper
load site_helper

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
  for host in aurora crux frontier perlmutter polaris sirius sophia sunspot generic-pbs generic-slurm workstation; do
    printf '%s\n' "box|EZPZ_MACHINE=$host"
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
box|EZPZ_MACHINES=machines|EZPZ_MACHINE=utopia
box|EZPZ_MACHINES=machines|EZPZ_MACHINE=Crux
box|EZPZ_MACHINE=utopia
box|EZPZ_MACHINE=aurora crux
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
  mkdir machines # of the user's own
  printf '%s\n' 'site = "nowhere"' 'source = ["a test"]' 'date = "2026-08-01"' 'scheduler = "slurm"' 'launcher = "srun"' >machines/utopia.toml
}

# What the shell says for every case, one a line: each answer or "error", with a bar between.
ask() { # bash|zsh
  local options=(--norc)
  [ "$1" = bash ] || options=(-f)
  cat >"ask.$1" <<'SCRIPT'
set -euo pipefail
. "$1"
say() { # FUNCTION...
  if answer=$("$@" 2>said) || { [ "$*" = ezpz_get_job_id ] && [ "$scheduler" = none ] && answer=; }; then
    [ "$*" != 'ezpz_write_hostfile hosts.of.job' ] || answer=$(tr '\n' ' ' <hosts.of.job)
  elif [ -s said ]; then
    answer=error
  else
    answer='silent error'
  fi
}
scheduler=
for name in machine_name scheduler_type job_id num_nodes; do
  say ezpz_get_$name
  [ "$name" != scheduler_type ] || scheduler=$answer
  printf '%s|' "$answer"
done
say ezpz_write_hostfile hosts.of.job
printf '%s\n' "${answer% }"
SCRIPT
  unshare --uts "$(type -P bash)" -c 'while IFS="|" read -ra part; do
      hostname "${part[0]}"
      env -i HOME="$1" PATH="$2" TMPDIR="$PWD" "${part[@]:1}" "${@:3}" </dev/null || echo "the shell is dead"
    done <cases.txt' bash "$PWD" "$BIN" "$1" "${options[@]}" "ask.$1" "$REPO/utils.sh" >"$1.txt"
}

setup_file() {
  load test_helper
  load site_helper
  export BIN=$BATS_FILE_TMPDIR/bin
  make_site_bin "$BIN" # with scontrol, which unfolds Slurm's nodelists
  cd "$BATS_FILE_TMPDIR" || return 1
  make_node_files
  cases >cases.txt
  unshare --uts true 2>/dev/null || return 0 # the tests say so
  ask bash
  ! command -v zsh >/dev/null || ask zsh
}

# The same of ezpz_topo, by an expression with env and host in it; says where they differ.
agrees() { # bash|zsh FIELD EXPRESSION
  need_hostname
  [ "$1" = bash ] || need_zsh
  cd "$BATS_FILE_TMPDIR" || return 1
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
cases, answers = (open(f).read().splitlines() for f in ("cases.txt", sys.argv[1] + ".txt"))
assert len(cases) == len(answers) > 60, (len(cases), len(answers))
wrong = 0
for case, answers in zip(cases, answers):
    answer = answers.split("|")[int(sys.argv[2])]
    host, *variables = case.split("|")
    env = {"HOME": os.getcwd(), "PATH": "/nonexistent", **dict(v.split("=", 1) for v in variables)}
    try:
        expected = str(eval(sys.argv[3]))
    except TopoError as error:
        expected = "error"
    if answer != expected:
        wrong += 1
        print(f"{case}: the shell says {answer}, ezpz_topo {expected}")
sys.exit(wrong > 0)' "$@"
}

# In the order of the answers. A job of a scheduler that nobody can read is an error to both.
MACHINE='get_machine_info(env, hostname=host).name'
SCHEDULER='(lambda s: s if s in ("pbs", "slurm", "none") else "error")(_allocation.scheduler_of(env))'
JOB='(lambda s: {"slurm": env.get("SLURM_JOB_ID"), "pbs": env.get("PBS_JOBID"), "none": ""}.get(s, "error"))(_allocation.scheduler_of(env))'
NODES='get_allocation(env).num_nodes'
# Without a job the one host is this one, by either name.
HOSTS='(lambda job: "localhost" if job.scheduler == "none" and answer == "localhost" else " ".join(job.hosts))(get_allocation(env))'

@test "bash: the machine's name for every captured environment" { agrees bash 0 "$MACHINE"; }
@test "bash: the scheduler for every captured environment" { agrees bash 1 "$SCHEDULER"; }
@test "bash: the job's id for every captured environment" { agrees bash 2 "$JOB"; }
@test "bash: the number of nodes for every captured environment" { agrees bash 3 "$NODES"; }
@test "bash: the hosts for every captured environment" { agrees bash 4 "$HOSTS"; }
@test "zsh: the machine's name for every captured environment" { agrees zsh 0 "$MACHINE"; }
@test "zsh: the scheduler for every captured environment" { agrees zsh 1 "$SCHEDULER"; }
@test "zsh: the job's id for every captured environment" { agrees zsh 2 "$JOB"; }
@test "zsh: the number of nodes for every captured environment" { agrees zsh 3 "$NODES"; }
@test "zsh: the hosts for every captured environment" { agrees zsh 4 "$HOSTS"; }

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

# What the kernel shows of devices, in a mount namespace of its own: DIR/dev and DIR/sys in place of /dev and /sys.
make_devices() {
  local node card
  mkdir -p nvidia/dev nvidia/sys none/dev none/sys amd/dev amd/sys intel/dev/dri intel/sys
  touch nvidia/dev/nvidia{0,1,2,3} nvidia/dev/nvidiactl nvidia/dev/nvidia-uvm amd/dev/kfd
  for node in 0 1 2 3; do
    mkdir -p amd/sys/class/kfd/kfd/topology/nodes/$node
    printf 'cpu_cores_count 0\nsimd_count %s\n' $((node > 0 ? 440 : 0)) >amd/sys/class/kfd/kfd/topology/nodes/$node/properties
  done
  for card in 128:38000:0000:18:00.0 129:38000:0000:19:00.0 130:30000:0000:00:02.0; do # the last is inside the CPU
    node=intel/sys/class/drm/renderD${card%%:*}/device
    mkdir -p "$node/tile0" "$node/tile1"
    touch "intel/dev/dri/renderD${card%%:*}"
    printf 'DRIVER=xe\nPCI_CLASS=%s\nPCI_ID=8086:0BD5\nPCI_SLOT_NAME=%s\n' "$(cut -d: -f2 <<<"$card")" "$(cut -d: -f3- <<<"$card")" >"$node/uevent"
  done
}

same_devices() {
  unshare --mount true 2>/dev/null || cannot 'unshare --mount fails'
  make_devices
  local kind
  for kind in none nvidia amd intel; do
    for variables in - CUDA_VISIBLE_DEVICES=0,1 CUDA_VISIBLE_DEVICES= CUDA_VISIBLE_DEVICES=0,-1,2 CUDA_VISIBLE_DEVICES=0,1,7 \
      CUDA_VISIBLE_DEVICES=1,1 CUDA_VISIBLE_DEVICES=GPU-8f3a,GPU-77 CUDA_VISIBLE_DEVICES=NoDevFiles ROCR_VISIBLE_DEVICES=0 \
      'ROCR_VISIBLE_DEVICES=0,1 HIP_VISIBLE_DEVICES=0' HIP_VISIBLE_DEVICES=0,2 ZE_AFFINITY_MASK=0,1,2 ZE_AFFINITY_MASK=0.1 ZE_AFFINITY_MASK=default \
      ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE 'ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE ZE_AFFINITY_MASK=0.1,1' TORCH_DEVICE=cpu; do
      case $kind$variables in # those that one may meet there
        *- | nvidiaCUDA* | amdROCR* | amdHIP* | amdCUDA*=0,1 | intelZE* | noneCUDA*= | noneCUDA*=0,1 | noneZE*2 | *TORCH*) printf '%s|%s\n' "$kind" "${variables#-}" ;;
      esac
    done
  done >cases
  for kind in none nvidia amd intel; do
    unshare --mount sh -c 'cd "$1"
      for f in null zero urandom tty; do touch dev/$f && mount --bind /dev/$f dev/$f; done
      ln -sf /proc/self/fd dev/fd
      cd .. && mount --rbind "$1/dev" /dev && mount --rbind "$1/sys" /sys
      while IFS="|" read -r kind variables; do
        [ "$kind" != "$1" ] ||
          printf "%s|%s|%s\n" "$kind" "$variables" "$(env -i HOME="$2" PATH="$3" $variables "$4" -c ". \"\$1\"; ezpz_get_gpus_per_node 2>/dev/null || echo error" sh "$5" </dev/null)"
      done <cases' sh "$kind" "$HOME_DIR" "$BIN" "${SH:-bash}" "$REPO/utils.sh"
  done >got
  [ "$(wc -l <got)" = "$(wc -l <cases)" ]
  topo '
import sys
from ezpz_topo import get_accelerators
from ezpz_topo._errors import TopoError
wrong = 0
for line in open("got"):
    kind, variables, answer = line.rstrip("\n").split("|")
    try:
        expected = str(get_accelerators(dict(v.split("=", 1) for v in variables.split()), root=kind, tools=False).count)
    except TopoError:
        expected = "error"
    if answer != expected:
        wrong += 1
        print(f"{kind} {variables}: the shell says {answer}, ezpz_topo {expected}")
sys.exit(wrong > 0)'
  grep -qx 'intel||4' got
  grep -qx 'nvidia|CUDA_VISIBLE_DEVICES=0,1|2' got
}
@test "bash: the devices that the kernel shows and variables leave" { same_devices; }
@test "zsh: the devices that the kernel shows and variables leave" { in_zsh same_devices; }

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
