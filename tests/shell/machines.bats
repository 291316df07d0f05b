#!/usr/bin/env bats
# `source utils.sh && ezpz_setup_env` as a person types it, on each machine: its host name, its job's
# variables, its module tree under a real Lmod, a Python of the site with a torch. uv is a fake that makes
# real environments; the real pip is in utils.bats.

bats_require_minimum_version 1.5.0
load test_helper
load site_helper

setup_file() {
  PYTHON=$(base_python)
  export PYTHON
  MINOR=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  export MINOR BIN=$BATS_FILE_TMPDIR/bin UV=$BATS_FILE_TMPDIR/uv SITES=$BATS_FILE_TMPDIR/sites HOME_DIR=$BATS_FILE_TMPDIR/home
  export CLONE="$BATS_FILE_TMPDIR/it's a clone"
  make_site_bin "$BIN" "$PYTHON"
  make_uv "$UV" "$PYTHON"
  make_sites "$SITES"
  # The Python of each module. What they share is a torch: in the home's site packages, where pip puts it.
  local place
  for place in frameworks pytorch conda; do
    mkdir -p "$SITES/$place/bin"
    make_script "$SITES/$place/bin/python3" "exec '$PYTHON' \"\$@\""
    ln -sf python3 "$SITES/$place/bin/python"
  done
  mkdir "$HOME_DIR"
  make_wheel "$BATS_FILE_TMPDIR" torch 2.9.0+site
  install_for_user "$BATS_FILE_TMPDIR"/torch-*.whl
  make_clone "$CLONE"
}

setup() {
  VARS=(SITES="$SITES" LMOD_PAGER=none PIP_CONFIG_FILE=/dev/null)
  rm -rf "$HOME_DIR/uv.said"
  cd "$BATS_TEST_TMPDIR" || return 1
  printf '%s\n' x1n0 x1n0 x1n1 x1n1 >nodes
}

in_pbs() { VARS+=(PBS_JOBID="$1" PBS_NODEFILE="$PWD/nodes" PBS_ENVIRONMENT=PBS_INTERACTIVE PBS_O_HOST=login1); }
in_slurm() { VARS+=(SLURM_JOB_ID=7 SLURM_JOB_NODELIST='nid[001-002]' SLURM_JOB_NUM_NODES=2 "$@"); }

# shellcheck disable=SC2016
WHOLE='
  . "$1/utils.sh"; before=$PATH; kept >kept.before
  ezpz_setup_env 2>report; echo "status $?" >>report
  once=$PATH; SECONDS=0; ezpz_setup_env 2>second; [ "$SECONDS" -le 30 ]; [ "$PATH" = "$once" ] && echo same
  kept >kept.after; cmp kept.before kept.after
  printf "%s\n" "$VIRTUAL_ENV" "$(command -v python)" "${http_proxy:-none}" "$EZPZ_SCHEDULER $EZPZ_NODES"
  python -c "import torch; print(torch.__file__)"
  ezpz_reset; [ "$PATH" = "$before" ] && echo reset; echo "${VIRTUAL_ENV-}${http_proxy-}${EZPZ_NODES-}${LOADEDMODULES-}"'

# What the last two lines of the report, and the shell, must say.
whole() { # MACHINE SCHEDULER DEVICES PROXY TREE
  local place="$CLONE/.venv/$1-py$MINOR" where what word
  VARS+=(MODULEPATH="$SITES/$5")
  BIN_DIR=$UV:$BIN here "$WITH_LMOD
    $KEPT
    ${OPTIONS-set -euo pipefail}
    $WHOLE" "$CLONE"
  cat report
  grep -qx 'status 0' report
  [ "${lines[0]}" = same ]
  [ "${lines[1]}" = "$place" ]
  [ "${lines[2]}" = "$place/bin/python" ]
  [ "${lines[3]}" = "$4" ]
  [ "${lines[4]}" = "$2 2" ]
  [[ ${lines[5]} == "$HOME_DIR"/*"/torch/__init__.py" ]] # the site's, not shadowed
  [ "${lines[6]}" = reset ]
  [ "${#lines[@]}" = 7 ] # and nothing left after it
  where=$(tail -n 3 report | head -n 1) what=$(tail -n 2 report | head -n 1)
  for word in "$1" "$2" "${JOB:-}" 2 "$3"; do [[ $where == *"$word"* ]]; done
  for word in "Python $MINOR" 'torch 2.9.0+site (kept' MPI "$place"; do [[ $what == *"$word"* ]]; done
  # uv was asked once, and never for a torch
  grep -q -e ' -e .*ezpz-topo' "$HOME_DIR/uv.said" || grep -q 'ezpz-topo' "$HOME_DIR/uv.said"
  no grep -E '(^| )torch( |=|$)' "$HOME_DIR/uv.said"
}

sites() { need_lmod && need_hostname; }
ALCF=http://proxy.alcf.anl.gov:3128

@test "Aurora" {
  sites
  JOB=2287864.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov
  in_pbs "$JOB"
  HOST_NAME=x4102c5s2b0n0 whole aurora pbs 12 $ALCF aurora
}
@test "Polaris, in zsh" {
  sites && need_zsh
  JOB=308834.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov
  in_pbs "$JOB"
  SH=zsh HOST_NAME=x3005c0s13b0n0 whole polaris pbs 4 $ALCF empty
}
@test "Perlmutter" {
  sites
  in_slurm SLURM_CLUSTER_NAME=perlmutter NERSC_HOST=perlmutter
  OPTIONS="set +eu" HOST_NAME=login05 whole perlmutter slurm 4 none perlmutter
}
@test "Frontier, in zsh" {
  sites && need_zsh
  in_slurm SLURM_CLUSTER_NAME=frontier LMOD_SYSTEM_NAME=frontier
  OPTIONS="set +eu" SH=zsh HOST_NAME=frontier00144 whole frontier slurm 8 http://proxy.ccs.ornl.gov:3128 frontier
}

# No module, no proxy, no machine's devices.
@test "a workstation: .venv itself, and a report without a job" {
  need_hostname
  HOST_NAME=laptop.local BIN_DIR=$UV:$BIN here "set -euo pipefail; $KEPT $WHOLE" "$CLONE"
  cat report
  grep -qx 'status 0' report
  [ "${lines[1]}" = "$CLONE/.venv" ]
  [ "${lines[4]}" = 'none 1' ]
  grep -q workstation report
}

# --- the place

@test "two machines and two Pythons that share a home do not share an environment" {
  sites
  VARS+=(MODULEPATH="$SITES/empty" EZPZ_MODULES='' EZPZ_MACHINE=polaris)
  BIN_DIR=$UV:$BIN here '. "$1/utils.sh"; ezpz_setup_env 2>/dev/null; echo "$VIRTUAL_ENV"; ezpz_reset; EZPZ_MACHINE=crux; ezpz_setup_env 2>/dev/null; echo "$VIRTUAL_ENV"' "$CLONE"
  [ "$output" = "$CLONE/.venv/polaris-py$MINOR"$'\n'"$CLONE/.venv/crux-py$MINOR" ]
}

@test "an environment that is active stays the one, though the module's Python comes first on PATH" {
  sites
  "$PYTHON" -m venv --without-pip mine
  in_pbs 2287864.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov
  VARS+=(MODULEPATH="$SITES/aurora")
  HOST_NAME=x4102c5s2b0n0 BIN_DIR=$UV:$BIN here "$WITH_LMOD"'
    set -eu; . mine/bin/activate; . "$1/utils.sh"; ezpz_setup_env; once=$PATH; ezpz_setup_env; [ "$PATH" = "$once" ]
    command -v python; echo "$LOADEDMODULES"; ezpz_reset; command -v python; echo "${LOADEDMODULES-} $PATH"' "$CLONE"
  has warning
  [ "${lines[-4]}" = "$PWD/mine/bin/python" ]
  [ "${lines[-3]}" = frameworks/2025.2.0 ]
  [ "${lines[-2]}" = "$PWD/mine/bin/python" ]
  [ "${lines[-1]}" = " $PWD/mine/bin:$UV:$BIN" ]
  [ ! -e "$CLONE/.venv/aurora-py$MINOR" ] || [ "$(grep -c making <<<"$output")" = 0 ]
}

@test "saved in a job with modules and environment, loaded in a plain shell: its Python, its torch, its modules" {
  sites
  in_pbs 308834.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov
  VARS+=(MODULEPATH="$SITES/empty")
  HOST_NAME=x3005c0s13b0n0 BIN_DIR=$UV:$BIN here "$WITH_LMOD"'
    set -eu; . "$1/utils.sh"; ezpz_setup_env; ezpz_save_env "$HOME/of the job"' "$CLONE"
  VARS=(SITES="$SITES" LMOD_PAGER=none)
  HOST_NAME=x3005c0s13b0n0 here "$WITH_LMOD"'
    set -eu; . "$1/utils.sh"; ezpz_load_env "$HOME/of the job" 2>/dev/null; command -v python; python -c "import torch; print(torch.__file__)"
    ezpz_get_job_id; ezpz_get_num_nodes; module -t list 2>&1 | head -n 1' "$CLONE"
  [ "${lines[0]}" = "$CLONE/.venv/polaris-py$MINOR/bin/python" ]
  [[ ${lines[1]} == */torch/__init__.py ]]
  [ "${lines[2]} ${lines[3]} ${lines[4]}" = "308834.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov 2 conda/2025-09-25" ]
}

# --- MPI and uv

@test "the site's MPI: mpi4py is built against it, once; without one: the wheels" {
  mkdir mpi
  make_script mpi/mpicc 'exit 0'
  make_script mpi/mpiexec 'echo HYDRA build details:'
  VARS+=(EZPZ_VENV="$PWD/one")
  BIN_DIR=$UV:$PWD/mpi:$BIN here '. "$1/utils.sh"; ezpz_setup_env' "$CLONE"
  has "$PWD/mpi/mpiexec"
  run -0 cat "$HOME_DIR/uv.said"
  has '--no-binary mpi4py'
  has "MPICC=$PWD/mpi/mpicc"
  run -0 grep 'pip install' "$HOME_DIR/uv.said"
  no grep -w mpich <<<"$output"
  VARS+=(EZPZ_VENV="$PWD/two")
  rm "$HOME_DIR/uv.said"
  BIN_DIR=$UV:$BIN here '. "$1/utils.sh"; ezpz_setup_env' "$CLONE"
  run -0 cat "$HOME_DIR/uv.said"
  has_not --no-binary
  has mpich
}

@test "a package that is none of ours is an error that lists them" {
  VARS+=(EZPZ_VENV="$PWD/one")
  BIN_DIR=$UV:$BIN EXPECT=1 here '. "$1/utils.sh"; ezpz_install ezpz-tq' "$CLONE"
  has ezpz-tq
  has ezpz-topo
  [ ! -e one ]
}
