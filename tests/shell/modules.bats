#!/usr/bin/env bats
# ezpz_load_modules with a real Lmod, and in one test with a real environment-modules, on module trees
# with the names that the sites use.

bats_require_minimum_version 1.5.0
load test_helper
load site_helper

setup_file() {
  export BIN=$BATS_FILE_TMPDIR/bin SITES=$BATS_FILE_TMPDIR/sites
  make_site_bin "$BIN"
  make_sites "$SITES"
  local tree=$SITES/odd
  make_module "$tree" broken/1 'LmodError("the licence server is down")'
  make_module "$tree" fine/1 'setenv("FINE", "1")' "prepend_path('PATH', '$SITES/fine/bin')"
  make_module "$tree" other/2 'setenv("OTHER", "2")'
  # One that sets PATH anew, and one that takes an active environment's place in it away.
  make_module "$tree" evicting/1 "setenv('PATH', '$SITES/evicting/bin:$BIN')"
  make_module "$tree" removing/1 "remove_path('PATH', os.getenv('VIRTUAL_ENV') .. '/bin')" 'unsetenv("VIRTUAL_ENV")'
  make_module "$tree" covering/1 "prepend_path('PATH', '$SITES/covering/bin')"
  mkdir -p "$SITES/covering/bin" "$SITES/evicting/bin"
  make_script "$SITES/covering/bin/python" 'echo the module'
  make_script "$SITES/evicting/bin/python" 'echo the module'
}

setup() {
  need_lmod
  fresh_home SITES="$SITES" LMOD_PAGER=none
}

# In a shell with Lmod, with utils.sh; $2 are its options, set when Lmod is there.
on_site() { # TREE SCRIPT [MACHINE]
  VARS+=(MODULEPATH="$SITES/$1" ${3:+EZPZ_MACHINE="$3"})
  here "$WITH_LMOD"'
    '"${OPTIONS-}"'
    . "$1"
    '"$2" "$REPO/utils.sh"
}

# --- each site

each_site() {
  local machine tree
  for machine in aurora sunspot perlmutter frontier polaris sirius sophia crux generic-pbs workstation; do
    VARS=(SITES="$SITES" LMOD_PAGER=none)
    tree=$machine
    case $machine in sunspot) tree=aurora ;; polaris | sirius | sophia | crux | generic-pbs | workstation) tree=empty ;; esac
    OPTIONS='set -euo pipefail' on_site "$tree" "$KEPT"' kept >kept.before; ezpz_load_modules; once=$PATH; ezpz_load_modules; kept >kept.after
      [ "$PATH" = "$once" ]; cmp kept.before kept.after; echo "-> ${LOADEDMODULES-} ${CONDA_DEFAULT_ENV-}"' "$machine"
    printf '%s %s\n' "$machine" "${lines[-1]}" >>got
  done
  diff - got <<'EXPECTED'
aurora -> frameworks/2025.2.0 
sunspot -> frameworks/2025.2.0 
perlmutter -> pytorch/2.8.0 
frontier -> rocm/6.4.1 
polaris -> conda/2025-09-25 base
sirius -> conda/2025-09-25 base
sophia -> conda/2025-09-25 base
crux ->  
generic-pbs ->  
workstation ->  
EXPECTED
}
@test "bash: each site's modules are loaded, once; options and PATH stay" { each_site; }
@test "zsh: each site's modules are loaded, once; options and PATH stay" { in_zsh each_site; }

@test "EZPZ_MODULES: in place of the machine's, in their order; empty: none" {
  VARS+=(EZPZ_MODULES='other fine/1')
  on_site odd 'set -eu; ezpz_load_modules; echo "$LOADEDMODULES"' aurora
  [ "${lines[-1]}" = other/2:fine/1 ]
  VARS+=(EZPZ_MODULES=)
  on_site odd 'set -eu; ezpz_load_modules; echo "none: ${LOADEDMODULES-}"' aurora
  [ "${lines[-1]}" = 'none: ' ]
  need_zsh
  VARS+=(EZPZ_MODULES='other fine/1')
  SH=zsh on_site odd 'ezpz_load_modules; echo "$LOADEDMODULES"' aurora
  [ "${lines[-1]}" = other/2:fine/1 ]
}

@test "what the user had loaded stays, in another version, too" {
  make_module "$SITES/two" frameworks/2024.1.0 'setenv("OLD", "1")'
  make_module "$SITES/two" frameworks/2025.2.0 'setenv("NEW", "1")'
  on_site two 'set -eu; module load frameworks/2024.1.0; ezpz_load_modules; echo "$LOADEDMODULES ${NEW-}"' aurora
  [ "${lines[-1]}" = 'frameworks/2024.1.0 ' ]
}

# --- what goes wrong

fails() { # TREE WORDS...
  local word
  for word in '' 'set -euo pipefail'; do
    VARS+=(SITES="$SITES")
    OPTIONS=$word EXPECT=1 on_site "$1" "$KEPT"' kept >kept.before; s=0; '"${BEFORE-}"'
      ezpz_load_modules >stdout || s=$?; kept >kept.after; cmp kept.before kept.after; [ ! -s stdout ]; echo "alive $s"; exit $s' aurora
    has 'alive 1'
  done
  for word in "${@:2}"; do has "$word"; done
  has 'ezpz: error'
}

@test "bash: a module that is not there" { fails empty frameworks EZPZ_MODULES; }
@test "bash: a module that fails: its own words, its name, and a remedy" {
  VARS+=(EZPZ_MODULES='fine broken')
  fails odd 'the licence server is down' broken
}
@test "a module that fails leaves none of the others behind, and the next call repairs" {
  VARS+=(EZPZ_MODULES='fine broken')
  on_site odd 'before=$PATH; ezpz_load_modules || EZPZ_MODULES="fine other" ezpz_load_modules && echo "$LOADEDMODULES"; ezpz_reset; [ "$PATH" = "$before" ] && echo "clean ${LOADEDMODULES-}"' aurora
  has fine/1:other/2
  [ "${lines[-1]}" = 'clean ' ]
}

@test "no module command: an error on a machine that has modules" {
  VARS+=(EZPZ_MACHINE=aurora)
  EXPECT=1 here '. "$1"; ezpz_load_modules' "$REPO/utils.sh"
  has module
  has frameworks
  has 'ezpz: error'
}

empty_modulepath() { # what turns `module load` into something that does nothing
  local how
  for how in 'unset MODULEPATH' 'MODULEPATH='; do
    VARS=(SITES="$SITES" EZPZ_MACHINE=aurora)
    EXPECT=1 here "$WITH_LMOD"'
      '"$how"'; . "$1"; ezpz_load_modules' "$REPO/utils.sh"
    has MODULEPATH
    has 'ezpz: error'
  done
}
@test "bash: an empty MODULEPATH is an error that says so" { empty_modulepath; }
@test "a module command that says nothing and does nothing (environment-modules 3 returns 0): noticed" {
  VARS+=(EZPZ_MACHINE=aurora MODULEPATH=/site)
  EXPECT=1 here 'module() { return 0; }; . "$1"; ezpz_load_modules' "$REPO/utils.sh"
  has 'loaded: none'
  has frameworks
}

@test "a module of another name that only begins alike is not the one" {
  VARS+=(EZPZ_MACHINE=aurora MODULEPATH=/site LOADEDMODULES=frameworks-old/1:gcc/frameworks)
  EXPECT=1 here 'module() { return 0; }; . "$1"; ezpz_load_modules' "$REPO/utils.sh"
  has frameworks
}

@test "conda's module loaded, but no conda to activate: an error with the name of the environment" {
  make_module "$SITES/noconda" conda/1 'setenv("CONDA_EXE", "/nowhere/conda")'
  VARS=(SITES="$SITES/none" LMOD_PAGER=none MODULEPATH="$SITES/noconda" EZPZ_MACHINE=polaris)
  EXPECT=1 here "$WITH_LMOD"'
    . "$1"; ezpz_load_modules' "$REPO/utils.sh"
  has 'conda activate base'
}

# --- an active environment

active() { # MODULE KIND
  local env=$BATS_TEST_TMPDIR/my\ env
  mkdir -p "$env/bin"
  make_script "$env/bin/python" 'echo mine'
  make_script "$env/bin/module-checker" :
  VARS+=(EZPZ_MODULES="$1")
  case $2 in
    venv) VARS+=(VIRTUAL_ENV="$env") ;;
    conda) VARS+=(CONDA_PREFIX="$env" CONDA_DEFAULT_ENV=mine CONDA_SHLVL=1) ;;
  esac
  OPTIONS='set -eu' BIN_DIR=$env/bin:$BIN on_site odd '
    ezpz_load_modules; python; echo "$VIRTUAL_ENV${CONDA_PREFIX-}" | tail -n 1; once=$PATH
    case $PATH in *"my env/bin"*"my env/bin"*) echo twice ;; esac
    ezpz_load_modules 2>/dev/null; [ "$PATH" = "$once" ] && echo same' aurora
}

evicted() {
  local module
  for module in evicting covering; do
    VARS=(SITES="$SITES")
    active "$module" venv
    has "$BATS_TEST_TMPDIR/my env"
    has warning # says that it was
    [ "${lines[-3]} ${lines[-2]} ${lines[-1]}" = "mine $BATS_TEST_TMPDIR/my env same" ]
  done
}
@test "bash: a module that evicts the active venv: noticed, said, and PATH restored, once" { evicted; }
@test "a module that removes the venv from PATH and its variable: both restored" {
  active removing venv
  [ "${lines[-3]} ${lines[-2]} ${lines[-1]}" = "mine $BATS_TEST_TMPDIR/my env same" ]
}

@test "a module that evicts an active conda environment: PATH restored" {
  VARS+=(VIRTUAL_ENV=)
  active evicting conda
  [ "${lines[-3]} ${lines[-2]} ${lines[-1]}" = "mine $BATS_TEST_TMPDIR/my env same" ]
}

# --- undone

reset_unloads() {
  OPTIONS='set -eu' on_site odd 'module load other; ezpz_load_modules; echo "$LOADEDMODULES"; ezpz_reset; echo "$LOADEDMODULES $PATH ${FINE-}"'
  [ "${lines[-2]}" = other/2:fine/1 ]
  [ "${lines[-1]}" = "other/2 $BIN " ]
}
@test "bash: reset unloads what was loaded here, and nothing else" { VARS+=(EZPZ_MODULES=fine) && reset_unloads; }
@test "zsh: reset unloads what was loaded here, and nothing else" { need_zsh && VARS+=(EZPZ_MODULES=fine) && SH=zsh reset_unloads; }

@test "reset leaves conda's base, its module and its module path" {
  on_site empty 'before=$PATH$MODULEPATH; ezpz_load_modules; ezpz_reset; [ "$PATH$MODULEPATH" = "$before" ] && echo "as before ${CONDA_PREFIX-}${LOADEDMODULES-}"' polaris
  [ "${lines[-1]}" = 'as before ' ]
}

# --- the other module system

# lmod and environment-modules exclude each other as packages: that one is unpacked into a folder.
need_environment_modules() {
  ENVIRONMENT_MODULES=$(compgen -G '/usr/lib/*/modulecmd.tcl' | head -n 1)
  [ -z "$ENVIRONMENT_MODULES" ] || return 0
  { command -v apt-get && command -v tclsh; } >/dev/null || cannot 'neither environment-modules nor apt-get and tclsh to unpack it'
  mkdir unpacked && cd unpacked || return 1
  { apt-get download environment-modules && dpkg-deb -x ./*.deb .; } >/dev/null 2>&1 || skip 'environment-modules cannot be downloaded'
  cd ..
  ENVIRONMENT_MODULES=$(compgen -G "$PWD/unpacked/usr/lib/*/modulecmd.tcl")
}

@test "environment-modules: loads, fails, an empty MODULEPATH, reset" {
  need_environment_modules
  mkdir -p tree/frameworks
  printf '%s\n' '#%Module' 'setenv ZE_FLAT_DEVICE_HIERARCHY FLAT' "prepend-path PATH $PWD/fw/bin" >tree/frameworks/2025.2.0
  printf '%s\n' '#%Module' 'error "the licence server is down"' >tree/broken
  local shell with='module() { eval "$('"$(type -P tclsh) $ENVIRONMENT_MODULES"' ${ZSH_VERSION:+zsh}${BASH_VERSION:+bash} "$@")"; }'
  for shell in bash zsh; do
    command -v "$shell" >/dev/null || continue
    VARS=(EZPZ_MACHINE=aurora MODULEPATH="$PWD/tree" MODULES_PAGER=)
    SH=$shell here "$with"'; set -eu; . "$1"; before=$PATH; ezpz_load_modules; ezpz_load_modules; echo "$LOADEDMODULES $PATH"; ezpz_reset; [ "$PATH" = "$before" ]; echo "${LOADEDMODULES-}."' "$REPO/utils.sh"
    [ "${lines[-2]} ${lines[-1]}" = "frameworks/2025.2.0 $PWD/fw/bin:$BIN ." ]
    SH=$shell EXPECT=1 here "$with"'; . "$1"; EZPZ_MODULES=broken ezpz_load_modules' "$REPO/utils.sh"
    has 'the licence server is down'
    SH=$shell EXPECT=1 here "$with"'; . "$1"; EZPZ_MODULES=none ezpz_load_modules' "$REPO/utils.sh"
    has none
    SH=$shell EXPECT=1 here "$with"'; unset MODULEPATH; . "$1"; ezpz_load_modules' "$REPO/utils.sh"
    has MODULEPATH
  done
}
