# Loaded, after test_helper, by the tests of machines, jobs and modules. A fake site is what a site is to
# utils.sh: a host name (a real one, in a UTS namespace of its own), variables, a module tree read by the
# real Lmod, a Python that has a torch. Nothing in the shell under test is replaced.

LMOD=/usr/share/lmod/lmod/init

# The whole PATH of these tests: no qstat, and Python only if given; of Slurm what unfolds a nodelist.
make_site_bin() { # DIR [PYTHON]
  make_bin "$@"
  local tool
  for tool in chmod cmp comm cut diff head hostname id mktemp stat tee uname uniq wc; do
    ! command -v "$tool" >/dev/null || ln -sf "$(type -P "$tool")" "$1/$tool"
  done
  [ -z "${EZPZ_TEST_BASH-}" ] || ln -sf "$EZPZ_TEST_BASH" "$1/bash" # scripts/* are executed with the one on PATH
  # The real one; outside a real Slurm it wants a configuration, whatever stands there.
  printf '%s\n' ClusterName=none SlurmctldHost=localhost NodeName=none >"$1/slurm.conf"
  tool=$(type -P scontrol) && make_script "$1/scontrol" "SLURM_CONF=\${SLURM_CONF:-'$1/slurm.conf'} exec '$tool' \"\$@\""
}

# What CI relies upon is never skipped there.
cannot() {
  [ "${CI-}" != true ] || {
    echo "$1, and CI=true"
    return 1
  }
  skip "$1"
}
need_hostname() { unshare --uts true 2>/dev/null || cannot 'unshare --uts fails: no host name of its own'; }
need_lmod() { [ -r "$LMOD/bash" ] || cannot 'lmod is not installed'; }

# shellcheck disable=SC2154 # output and status are set by bats' run
# As in_shell, with nothing in the environment but VARS; on the host HOST_NAME if that is set; where the
# directories READ_ONLY cannot be written (for root neither: permissions would not hold it back). Another bash,
# such as a 3.2, takes the tests with EZPZ_TEST_BASH=/path/to/it.
here() { # SCRIPT [ARGUMENT...]
  local options=(--norc --noprofile) on=() shell=${SH:-${EZPZ_TEST_BASH:-bash}}
  [ "$shell" != zsh ] || options=(-f)
  # shellcheck disable=SC2016 # for that sh
  [ -z "${HOST_NAME-}" ] || on=(unshare --uts sh -c 'hostname "$1" && shift && exec "$@"' sh "$HOST_NAME")
  local place
  for place in "${READ_ONLY[@]}"; do
    # shellcheck disable=SC2016
    on=(unshare --mount sh -c 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"' sh "$place" "${on[@]}")
  done
  run "${on[@]}" env -i HOME="$HOME_DIR" TMPDIR="$BATS_TEST_TMPDIR" PATH="${BIN_DIR:-$BIN}" EZPZ_LOG_LEVEL=INFO \
    "${VARS[@]}" "$shell" "${options[@]}" -c "$1" "$shell" "${@:2}" </dev/null
  printf '%s\nexit status %s, expected %s\n' "$output" "$status" "${EXPECT:-0}" # shown when the test fails
  [ "$status" = "${EXPECT:-0}" ]
}

# What a person's shell keeps, whatever our functions do: options, traps, IFS, working directory, aliases, umask.
# shellcheck disable=SC2016,SC2034 # for the shells under test
KEPT='kept() { set +o; trap; alias; umask; pwd; printf "%s|" "$IFS"; if [ -n "${ZSH_VERSION-}" ]; then setopt; else shopt -p; fi; }
'

# --- module trees

# One module file: Lua for Lmod. Words: name/version, then its lines.
make_module() { # TREE NAME LINE...
  mkdir -p "$(dirname "$1/$2")"
  printf '%s\n' "${@:3}" >"$1/$2.lua"
}

# The module tree of each site, with names and effects as the sites have them; conda's is in /soft/modulefiles.
# shellcheck disable=SC2016 # for that conda
make_sites() { # DIR
  local site=$1 conda
  make_module "$site/aurora" frameworks/2025.2.0 'setenv("ZE_FLAT_DEVICE_HIERARCHY", "FLAT")' \
    "prepend_path('PATH', '$site/frameworks/bin')" "setenv('CONDA_PREFIX', '$site/frameworks')"
  make_module "$site/perlmutter" pytorch/2.8.0 "prepend_path('PATH', '$site/pytorch/bin')"
  make_module "$site/frontier" rocm/6.4.1 "prepend_path('PATH', '$site/rocm/bin')"
  make_module "$site/soft/modulefiles" conda/2025-09-25 "setenv('CONDA_EXE', '$site/conda/bin/conda')" \
    "prepend_path('PATH', '$site/conda/condabin')" \
    "set_shell_function('conda', 'eval \"\$($site/conda/bin/conda \"\$@\")\"', '')"
  make_module "$site/empty" placeholder/1 'setenv("PLACEHOLDER", "1")'
  for conda in frameworks pytorch rocm conda/condabin; do mkdir -p "$site/$conda/bin"; done
  # conda activate base: what it does to the shell, and no more
  mkdir -p "$site/conda/bin"
  make_script "$site/conda/bin/conda" 'case "$1 ${2-}" in' \
    "'activate base') printf '%s\n' 'export CONDA_PREFIX=$site/conda CONDA_DEFAULT_ENV=base CONDA_SHLVL=1 PATH=$site/conda/bin:\$PATH' ;;" \
    "'deactivate '*) printf '%s\n' 'unset CONDA_PREFIX CONDA_DEFAULT_ENV; export CONDA_SHLVL=0 PATH=\${PATH#$site/conda/bin:}' ;;" \
    '*) echo false ;;' 'esac'
}

# Lmod in the shell under test, as a site's profile starts it. The tree of the site is $1; the word
# /soft/modulefiles, which is the site's own, leads into the test's folder.
# shellcheck disable=SC2016,SC2034 # for the shells under test
WITH_LMOD='
  . /usr/share/lmod/lmod/init/${ZSH_VERSION:+zsh}${BASH_VERSION:+bash}
  if [ -n "${ZSH_VERSION-}" ]; then functions[lmod_module]=$functions[module]
  else eval "lmod_$(declare -f module)"; fi
  module() {
    local word words
    words=()
    for word; do
      case $word in /soft/modulefiles) word=$SITES/soft/modulefiles ;; esac
      words+=("$word")
    done
    lmod_module "${words[@]}"
  }'

# A uv that makes real environments and records what else it is asked for: its index is not reached from here.
# shellcheck disable=SC2016 # for that uv
make_uv() { # DIR PYTHON
  mkdir -p "$1"
  make_topo "$1"
  make_script "$1/uv" 'printf "%s\n" "uv $*${MPICC:+ MPICC=$MPICC}" >>"$HOME/uv.said"' \
    'case "$1" in' \
    'venv)' \
    '  site= place=' \
    '  shift' \
    '  while [ $# -gt 0 ]; do' \
    '    case $1 in --system-site-packages) site=$1 ;; --python | -p | --prompt) shift ;; -*) ;; *) place=$1 ;; esac' \
    '    shift' \
    '  done' \
    "  '$2' -m venv --without-pip \$site \"\$place\" && cp '$1/ezpz-topo' \"\$place/bin\" ;;" \
    'pip) [ "${2-}" != list ] && [ "${2-}" != freeze ] ;;' \
    '--version) echo "uv 0.9.0" ;;' \
    'esac'
}
