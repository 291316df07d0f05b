#!/usr/bin/env bats
# Scheduler, job, nodes and host files: in captured environments of PBS and Slurm. Saving a job's
# environment and loading it in a second shell. Of Python, PATH has ezpz-topo alone.

bats_require_minimum_version 1.5.0
load test_helper
load site_helper

# What ezpz_setup_job exports. None of them is a name that ezpz_topo reads.
FACTS='EZPZ_GPUS_PER_NODE EZPZ_HOSTFILE EZPZ_JOB EZPZ_NODES EZPZ_SCHEDULER'

setup_file() {
  export BIN=$BATS_FILE_TMPDIR/bin
  make_site_bin "$BIN"
  make_topo "$BIN"
}

setup() {
  fresh_home && mkdir elsewhere
  # as PBS writes it: a line for each slot, full names
  printf '%s\n' x1n0.site.gov x1n0.site.gov x1n1.site.gov x1n1.site.gov >nodes
  # captured from a real OpenPBS 23.06
  BATCH=(ENVIRONMENT=BATCH PBS_ENVIRONMENT=PBS_BATCH PBS_JOBID=1.pbs-0001 PBS_JOBNAME=probe PBS_QUEUE=workq
    PBS_NODEFILE="$PWD/nodes" PBS_NODENUM=0 PBS_TASKNUM=1 PBS_MOMPORT=15003 NCPUS=2 OMP_NUM_THREADS=2
    PBS_JOBCOOKIE=0123456789ABCDEF PBS_JOBDIR=/home/alice PBS_O_HOME=/home/alice PBS_O_HOST=login1 PBS_O_LANG=C
    PBS_O_LOGNAME=alice PBS_O_PATH=/usr/bin PBS_O_QUEUE=workq PBS_O_SHELL=/bin/bash PBS_O_SYSTEM=Linux
    PBS_O_WORKDIR=/home/alice/run)
  SLURM=(SLURM_JOB_ID=7 SLURM_JOBID=7 SLURM_JOB_NODELIST='nid[001-002,007]' SLURM_NODELIST='nid[001-002,007]'
    SLURM_JOB_NUM_NODES=3 SLURM_NNODES=3 SLURM_NTASKS=6 SLURM_TASKS_PER_NODE='2(x3)' SLURM_CLUSTER_NAME=lumi)
}

# --- what the job is

# shellcheck disable=SC2016
ASK='set -euo pipefail; . "$1"; echo $(ezpz_get_scheduler_type) $(ezpz_get_job_id || :) $(ezpz_get_num_nodes) $(ezpz_get_gpus_per_node)'
says() { # ANSWER VARIABLE...
  VARS=("${@:2}")
  here "$ASK" "$REPO/utils.sh"
  [ "${lines[-1]}" = "$1" ]
}
answers() {
  says 'pbs 1.pbs-0001 2 0' "${BATCH[@]}" TORCH_DEVICE=cpu
  cp nodes '40[1].pbs-0001' # an array's node file: a pattern to a careless shell
  says 'pbs 40[1].pbs-0001 2 4' "${BATCH[@]}" 'PBS_JOBID=40[1].pbs-0001' "PBS_NODEFILE=$PWD/40[1].pbs-0001" \
    EZPZ_MACHINE=polaris
  says 'slurm 7 3 8' "${SLURM[@]}" EZPZ_MACHINE=frontier # off its nodes
  says 'none 1 0' TORCH_DEVICE=cpu
  has 'ezpz: error: no job'
}
@test "bash: scheduler, job, nodes and devices" { answers; }
@test "zsh: scheduler, job, nodes and devices" { in_zsh answers; }

@test "what cannot be known is an error with ezpz-topo's words, and nothing is exported or written" {
  local variables
  for variables in 'SLURM_JOB_ID=7 PBS_JOBID=1.pbs' SLURM_JOB_NODELIST=nid001 LSB_JOBID=5 "PBS_NODEFILE=$PWD/missing PBS_JOBID=1.pbs"; do
    # shellcheck disable=SC2206
    VARS=($variables)
    EXPECT=1 here '. "$1"; ezpz_get_scheduler_type || ezpz_get_num_nodes || ezpz_write_hostfile out || {
      ezpz_setup_job; s=$?; env | grep EZPZ_ | grep -v LOG_LEVEL; exit $s; }' "$REPO/utils.sh"
    case $variables in LSB*) has 'hosts cannot be read' ;; *) has "${variables%%=*}" ;; esac
    has_not 'EZPZ_SCHEDULER='
    [ ! -e out ]
  done
}

@test "before there is an environment: what needs it says so, with the remedy" {
  make_site_bin bare
  VARS=("${BATCH[@]}")
  local call
  for call in get_scheduler_type get_job_id get_num_nodes get_gpus_per_node write_hostfile setup_job; do
    BIN_DIR=$PWD/bare EXPECT=1 here '. "$1"; "$2"' "$REPO/utils.sh" "ezpz_$call"
    has 'call ezpz_setup_env'
  done
}

# --- the exported facts

setup_job() {
  VARS=("${BATCH[@]}")
  here "$KEPT"'
    set -euo pipefail; . "$1"; kept >kept.before; env | sort >before
    ezpz_setup_job; env | sort >after; kept >kept.after; ezpz_setup_job; env | sort | cmp - after
    cmp kept.before kept.after; cat "$EZPZ_HOSTFILE"' "$REPO/utils.sh"
  [ "${lines[-2]} ${lines[-1]}" = 'x1n0.site.gov x1n1.site.gov' ]
  run comm -13 before after
  [ "$(sed 's/=.*//' <<<"$output" | grep -v '^_$' | tr '\n' ' ')" = "$FACTS " ]
  has EZPZ_SCHEDULER=pbs
  has EZPZ_JOB=1.pbs-0001
  has EZPZ_NODES=2
  # what ezpz_topo sees is what it saw without them
  env -i PYTHONPATH="$REPO/packages/ezpz-topo/src" "${VARS[@]}" "$(type -P python3)" -c 'import ezpz_topo, sys
before, after = (dict(l.rstrip("\n").split("=", 1) for l in open(f) if "=" in l) for f in ("before", "after"))
assert ezpz_topo.get_rank_info(before) == ezpz_topo.get_rank_info(after)
assert ezpz_topo.get_allocation(before) == ezpz_topo.get_allocation(after)
assert ezpz_topo.get_machine_info(before) == ezpz_topo.get_machine_info(after)'
}
@test "bash: setup_job exports the facts, once, and nothing that misleads ezpz_topo" { setup_job; }
@test "zsh: setup_job exports the facts, once, and nothing that misleads ezpz_topo" { in_zsh setup_job; }

@test "setup_job keeps what somebody set, but not what another job exported (qsub -V)" {
  echo mine >mine
  VARS=("${BATCH[@]}" EZPZ_GPUS_PER_NODE=3 EZPZ_HOSTFILE="$PWD/mine")
  here '. "$1"; ezpz_setup_job; echo "$EZPZ_GPUS_PER_NODE $EZPZ_HOSTFILE"; cat "$EZPZ_HOSTFILE"' "$REPO/utils.sh"
  [ "${lines[-2]} ${lines[-1]}" = "3 $PWD/mine mine" ]
  VARS=("${BATCH[@]}" EZPZ_SCHEDULER=slurm EZPZ_JOB=6 EZPZ_NODES=99 EZPZ_GPUS_PER_NODE=9 EZPZ_HOSTFILE="$PWD/mine")
  here '. "$1"; ezpz_setup_job; echo "$EZPZ_SCHEDULER $EZPZ_JOB $EZPZ_NODES"; cat "$EZPZ_HOSTFILE"' "$REPO/utils.sh"
  [ "${lines[-3]} ${lines[-2]} ${lines[-1]}" = 'pbs 1.pbs-0001 2 x1n0.site.gov x1n1.site.gov' ]
}

# --- host files

hostfile() {
  VARS=("${BATCH[@]}")
  here 'set -eu; . "$1"; ezpz_write_hostfile "a file"; cat "a file"; cd elsewhere; f=$(ezpz_write_hostfile); cat "$f"
    g=$(ezpz_write_hostfile); [ "$f" = "$g" ]; case $f in /*) ;; *) false ;; esac; [ -z "$(ls)" ]' "$REPO/utils.sh"
  [ "${lines[0]}" = "$PWD/a file" ] || [ "${lines[0]}" = 'a file' ]
  [ "${lines[*]:1}" = 'x1n0.site.gov x1n1.site.gov x1n0.site.gov x1n1.site.gov' ]
  VARS=()
  here 'set -eu; . "$1"; cat "$(ezpz_write_hostfile)"' "$REPO/utils.sh"
  [ "$output" = localhost ]
}
@test "bash: a host file: one host a line, each once, not in the working directory" { hostfile; }
@test "zsh: a host file: one host a line, each once, not in the working directory" { in_zsh hostfile; }

@test "a host file that cannot be written: an error with its path, and nothing left" {
  VARS=("${BATCH[@]}")
  EXPECT=1 here '. "$1"; ezpz_write_hostfile /proc/none/hosts' "$REPO/utils.sh"
  has /proc/none/hosts
  EXPECT=1 here '. "$1"; ezpz_write_hostfile elsewhere' "$REPO/utils.sh" # a directory
  [ -z "$(ls -A elsewhere)" ]
}

# --- a second shell

# What a careless writer or reader would let out.
nasty() {
  NASTY=$'a b\n\'"$(touch pwned)`touch pwned`;touch pwned #\\ \t!x %s é'
  VARS=("${BATCH[@]}" PBS_JOBNAME="$NASTY" MASTER_ADDR=x1n0 MASTER_PORT=29500 EZPZ_MACHINE=polaris SECRET_TOKEN=hunter2
    OTHER=$'x\nPBS_INJECTED=1\nexport PBS_INJECTED=1' 'PBS_BAD-NAME;touch pwned=1')
}

save_and_load() { # FROM TO
  nasty
  SH=$1 here 'set -eu; . "$1"; ezpz_setup_job; ezpz_save_env saved' "$REPO/utils.sh"
  [ "$(stat -c %a saved)" = 600 ]
  no grep -e hunter2 -e SECRET_TOKEN saved
  VARS=()
  SH=$2 here "$KEPT"' set -eu; . "$1"; kept >kept.before; ezpz_load_env saved; kept >kept.after; cmp kept.before kept.after
    env >loaded; printf "%s|" "$PBS_JOBNAME"' "$REPO/utils.sh"
  [ "${output##*$'\n'exit}" ] && [[ $output == *"$NASTY|"* ]]
  grep -qx PBS_JOBID=1.pbs-0001 loaded
  grep -qx MASTER_PORT=29500 loaded
  grep -qx EZPZ_NODES=2 loaded
  no grep -e '^PBS_INJECTED' -e SECRET_TOKEN loaded
  [ ! -e pwned ]
}
@test "save in bash, load in bash: every variable of the job, verbatim, and no other" { save_and_load bash bash; }
@test "save in zsh, load in bash" { need_zsh && save_and_load zsh bash; }
@test "save in bash, load in zsh" { need_zsh && save_and_load bash zsh; }

@test "without a file: saved under HOME, for this user alone, and found by the second shell" {
  nasty
  here 'umask 000; . "$1"; ezpz_save_env; umask' "$REPO/utils.sh"
  [[ ${lines[-1]} =~ ^0*$ ]]
  run -0 find "$HOME_DIR" -type f
  [ "${#lines[@]}" = 1 ]
  [ "$(stat -c %a "${lines[0]}")" = 600 ]
  [[ ${lines[0]} == *1.pbs-0001* ]]
  VARS=()
  here '. "$1"; ezpz_load_env; echo "$PBS_JOBID"' "$REPO/utils.sh"
  [ "${lines[-1]}" = 1.pbs-0001 ]
}

refuses() { # EXPECTED-WORDS
  EXPECT=1 here '. "$1"; ezpz_load_env saved; s=$?; env | grep PBS_; exit $s' "$REPO/utils.sh"
  has "$1"
  has_not 'PBS_JOBID=1'
  [ ! -e pwned ]
}

# Another node's shell often has a poorer PATH (pbs_tmrsh: /bin:/usr/bin), and the same home.
@test "what the first node saved is replaced there only" {
  need_hostname
  local file
  VARS=("${BATCH[@]}")
  HOST_NAME=x1n0 BIN_DIR=$PWD/rich:$BIN here '. "$1"; ezpz_save_env' "$REPO/utils.sh"
  file=$output
  HOST_NAME=x1n1 here '. "$1"; ezpz_save_env' "$REPO/utils.sh"
  [ "$output" = "$file" ]
  grep -q "^PATH=$PWD/rich:" "$file"
  HOST_NAME=x1n0.site.gov here '. "$1"; ezpz_save_env' "$REPO/utils.sh"
  grep -q "^PATH=$BIN" "$file"
}

@test "load refuses a file that others can write, another's, a pipe, and one that is not there" {
  VARS=("${BATCH[@]}")
  here '. "$1"; ezpz_save_env saved' "$REPO/utils.sh"
  VARS=()
  local mode
  for mode in 660 602; do
    chmod "$mode" saved
    refuses saved
  done
  chmod 600 saved
  if [ "$(id -u)" = 0 ]; then
    chown 65534 saved
    refuses saved
    mv saved theirs
    ln -s theirs saved
    refuses saved
    rm saved
  else
    rm saved
  fi
  refuses saved # not there
  mkdir saved
  refuses saved
  rmdir saved
  mkfifo -m 600 saved
  refuses saved
}

changed_file() {
  VARS=("${BATCH[@]}")
  here '. "$1"; ezpz_save_env good' "$REPO/utils.sh"
  VARS=()
  local line
  for line in 'touch pwned' 'export PBS_A=$(touch pwned)' 'PBS_A=b; touch pwned' 'PBS_A=`touch pwned`' 'PBS_A="b"$(touch pwned)' \
    'PBS_A[$(touch pwned)]=1' 'PBS_A=1 touch pwned' '$(touch pwned)=1' 'PBS_$(touch pwned)=1' 'PBS_A;touch pwned;=1' \
    LD_PRELOAD=/evil.so BASH_ENV=/evil PROMPT_COMMAND='touch pwned' IFS=x PYTHONSTARTUP=/evil 'BASH_FUNC_ls%%=() { touch pwned; }'; do
    { cat good && printf '%s\n' "$line"; } >saved
    here '. "$1"; ezpz_load_env saved; ls >/dev/null; env | grep -i evil; env | grep ^BASH_FUNC; printf %s "$IFS" | grep x; :' "$REPO/utils.sh"
    [ ! -e pwned ]
    has_not evil
    has_not BASH_FUNC
  done
}
@test "bash: nothing in a changed file is executed, and only the names that are saved are exported" { changed_file; }
@test "zsh: nothing in a changed file is executed, and only the names that are saved are exported" { in_zsh changed_file; }

@test "save where nothing may be written: an error with the path; no file is left open to others meanwhile" {
  VARS=("${BATCH[@]}")
  EXPECT=1 here '. "$1"; ezpz_save_env /proc/none/saved' "$REPO/utils.sh"
  has /proc/none/saved
  touch saved && chmod 666 saved # an older one
  here '. "$1"; ezpz_save_env saved' "$REPO/utils.sh"
  [ "$(stat -c %a saved)" = 600 ]
}

# --- undone

reset_job() {
  VARS=("${BATCH[@]}" EZPZ_MACHINE=polaris EZPZ_GPUS_PER_NODE=3)
  here "$KEPT"'
    set -euo pipefail; . "$1"; env | sort | grep -v ^_= >before; kept >kept.before
    ezpz_setup_job; ezpz_set_proxy >/dev/null; [ "$(env | sort | grep -v ^_=)" != "$(cat before)" ]
    ezpz_reset; env | sort | grep -v ^_= >after; ezpz_reset; env | sort | grep -v ^_= >again; kept >kept.after' "$REPO/utils.sh"
  diff before after
  diff after again
  diff kept.before kept.after
  # and without any setup before
  here 'set -eu; . "$1"; env | sort | grep -v ^_= >before; ezpz_reset; env | sort | grep -v ^_= | diff before -' "$REPO/utils.sh"
}
@test "bash: reset leaves the environment as it was, and what somebody set" { reset_job; }
@test "zsh: reset leaves the environment as it was, and what somebody set" { in_zsh reset_job; }

# --- the proxy

@test "set_proxy: the machine's, another, never over one that is set; no_proxy has localhost" {
  VARS=("${BATCH[@]}" EZPZ_MACHINE=polaris)
  HOST_NAME=x1n0 && need_hostname
  here 'set -eu; . "$1"; ezpz_set_proxy >/dev/null; env | grep -i proxy | sort' "$REPO/utils.sh"
  local name
  for name in http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; do has "$name=http://proxy.alcf.anl.gov:3128"; done
  [[ $output =~ no_proxy=.*localhost ]]
  has alcf.anl.gov
  here 'set -eu; . "$1"; ezpz_set_proxy http://other:1 >/dev/null; echo "$https_proxy"' "$REPO/utils.sh"
  [ "${lines[-1]}" = http://other:1 ]
  VARS+=(https_proxy=http://mine:2)
  here 'set -eu; . "$1"; ezpz_set_proxy >/dev/null; echo "$https_proxy"' "$REPO/utils.sh"
  [ "${lines[-1]}" = http://mine:2 ]
  VARS=()
  here 'set -u; . "$1"; ezpz_set_proxy >/dev/null 2>&1; env | grep -ci _proxy= || :' "$REPO/utils.sh"
  [ "${lines[-1]}" = 0 ]
}
