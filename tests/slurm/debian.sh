#!/bin/bash
# Another release of Debian in a directory, for its version of Slurm. Needs root, and debootstrap to make one.
#
#   debian.sh make SUITE DIRECTORY PACKAGE...    install the suite (trixie, sid, …) with these packages: a minute or two
#   debian.sh enter DIRECTORY PATHS COMMAND...   run COMMAND with DIRECTORY as its root directory, in its own mount namespace
#
# PATHS are directories of this machine, separated by colons, that are in the other root directory too; the working directory
# must be in one of them. /proc, /sys, /dev are this machine's, /run is empty. Processes and network are not separated.
set -eu
usage() { sed -n 2,9p "$0" >&2; exit 2; }

make_root() {
  local suite=$1 root=$2 mirror packages; shift 2
  packages=$*
  mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*debian*.sources 2>/dev/null |
    awk '/^URIs:/ {print $2; exit} /^deb / {print $2; exit}')
  rm -rf --one-file-system "$root.new"
  debootstrap --variant=minbase --include="${packages// /,}" "$suite" "$root.new" ${mirror:+"$mirror"} >"$root.log" 2>&1 ||
    { tail -n 5 "$root.log" >&2; exit 1; }
  mv "$root.new" "$root"
}

enter_root() {
  local root=$1 paths=$2; shift 2
  exec unshare --mount --propagation private bash -euc '
    root=$1 directory=$PWD; IFS=: read -ra paths <<<"$2"; shift 2
    mount --bind "$root" "$root"
    for path in /proc /sys /dev "${paths[@]}"; do mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; done
    mount -t tmpfs tmpfs "$root/run"
    mkdir "$root/run/outside"
    cd "$root"
    pivot_root . run/outside
    umount -l /run/outside
    cd "$directory"
    exec "$@"' bash "$root" "$paths" "$@"
}

case ${1:-} in
  make) [ $# -ge 4 ] || usage; shift; make_root "$@" ;;
  enter) [ $# -ge 4 ] || usage; shift; enter_root "$@" ;;
  *) usage ;;
esac
