#!/usr/bin/env bats
# The machine's name, which the shell finds without a Python, is the one that ezpz_topo finds.

bats_require_minimum_version 1.5.0
load test_helper
load site_helper

# One line a case: host name|VARIABLE=value|...
cases() {
  local host server
  for host in polaris-login-02 polaris-login-02.hsn.cm.polaris.alcf.anl.gov x3200c0s19b1n0.hsn.cm.sirius.alcf.anl.gov \
    aurora-uan-0010.hostmgmt1000.cm.aurora.alcf.anl.gov sophia-gpu-06.lab.alcf.anl.gov frontier00144 \
    crux-uan-0001.head.cm.crux.alcf.anl.gov nid001321.chn.perlmutter.nersc.gov x1921c1s2b0n0.hsn.cm.sunspot.alcf.anl.gov; do
    printf '%s\n' "$host" "x3005c0s13b0n0|PBS_JOBID=1.pbs-0001|PBS_O_HOST=$host"
  done
  for server in 2287864.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov '40[1].crux-pbs-0001.head.cm.crux.alcf.anl.gov' \
    192796.sophia-pbs-01.lab.alcf.anl.gov; do
    printf '%s\n' "x1000c0s0b1n1|PBS_JOBID=$server" "x1|PBS_JOBID=$server|PBS_O_HOST=aurora-uan-0010" \
      "x1|PBS_JOBID=$server|NERSC_HOST=perlmutter"
  done
  for host in x1000c0s0b1n1 my-aurora-uan-0010 frontier frontier-x1 frontier0a notaurora.alcf.anl.gov \
    aurora.alcf.anl.gov.example.org aurora.alcf.anl.gov POLARIS-LOGIN-02 laptop.local; do
    printf '%s\n' "$host" "$host|NERSC_HOST=perlmutter"
  done
  for host in Frontier generic-pbs workstation utopia Crux 'aurora crux' auroa ../aurora aurora.toml ''; do
    printf '%s\n' "polaris-login-02|EZPZ_MACHINE=$host|EZPZ_MACHINES=machines"
  done
  cat <<'CASES'
login05|NERSC_HOST=perlmutter
box|LMOD_SYSTEM_NAME=frontier
box|NERSC_HOST=perlmutter|LMOD_SYSTEM_NAME=frontier
frontier00144|LMOD_SYSTEM_NAME=crusher
nid001234|NERSC_HOST=cori
polaris-login-02.hsn.cm.polaris.alcf.anl.gov|NERSC_HOST=perlmutter
nid001234|SLURM_JOB_ID=7|SLURM_CLUSTER_NAME=perlmutter
frontier00144|SLURM_JOB_ID=7|SLURM_CLUSTER_NAME=frontier|NERSC_HOST=perlmutter
nid001234|SLURM_JOB_ID=7|SLURM_CLUSTER_NAME=lumi
nid001234|SLURM_JOB_ID=7|SLURM_CLUSTER_NAME=lumi|NERSC_HOST=perlmutter
login05.frontier.olcf.ornl.gov|SLURM_JOB_ID=7|SLURM_CLUSTER_NAME=lumi
polaris-login-02|SLURM_JOB_ID=7
x1|PBS_JOBID=1.pbs-0001|NERSC_HOST=perlmutter
x1|PBS_JOBID=1.pbs-0001|SLURM_JOB_ID=7
CASES
}

same_names() {
  need_hostname
  cd "$BATS_TEST_TMPDIR" && make_site_bin bin && mkdir machines && cases >cases
  printf '%s\n' 'extends = "polaris"' >machines/utopia.toml
  # shellcheck disable=SC2016
  unshare --uts "$(type -P bash)" -c 'while IFS="|" read -ra part; do
      hostname "${part[0]}"
      env -i HOME="$PWD" PATH="$PWD/bin" "${part[@]:1}" "$2" ${3:+"$3"} -c ". \"\$1\"; ezpz_get_machine_name" \
        sh "$1" </dev/null 2>/dev/null || echo error
    done <cases' bash "$REPO/utils.sh" "${SH:-bash}" >got
  PYTHONPATH=$REPO/packages/ezpz-topo/src python3 - <<'PY' >expected
import os
from ezpz_topo import TopoError, get_machine_info
for line in open("cases"):
    host, *variables = line.rstrip("\n").split("|")
    env = {"HOME": os.getcwd(), **dict(v.split("=", 1) for v in variables)}
    try:
        print(get_machine_info(env, hostname=host).name)
    except TopoError:
        print("error")
PY
  paste -d'|' cases expected >wanted
  paste -d'|' cases got | diff wanted -
  [ "$(wc -l <got)" -ge 70 ]
}
@test "bash: the machine's name is that of ezpz_topo" { same_names; }
@test "zsh: the machine's name is that of ezpz_topo" { in_zsh same_names; }
