"""Shell scripts that each node runs to find, unpack and remove copies of environments.

A node's directory of copies, which only its user can enter, contains:

    env-<fingerprint>/            a copy; its mtime is the last time that a job found or made it
    env-<fingerprint>/.complete   the size of the copy in kilobytes, once it can be used
    env-<fingerprint>.….tar       an archive that sbcast has brought, until it is unpacked
    .removed-…                    copies that are being removed

A copy is locked by a flock on its directory. A shell script that finds the copy for a job, and each agent that runs
from the copy, hold a shared lock. The copy is unpacked or moved away under an exclusive lock. Locks end with their
processes, so jobs that have ended hold none.
"""

from __future__ import annotations

COMPLETE = "complete"
_MARK = "tf4slurm-stage-env:"

_COMMON = rf"""
umask 077
answer() {{ echo "{_MARK} ${{SLURMD_NODENAME:-$(hostname)}} $*"; exit; }}
"""

FIND = (
    _COMMON
    + r"""
parent=$1 name=$2 needed=$3 limit=$4 in_use=$5 unused=$6
error=$(mkdir -p "$parent" 2>&1) || answer "error: $error"
[ ! -L "$parent" ] && cd "$parent" && [ -O . ] && chmod 700 . ||
  answer "error: $parent is not a directory of this user"
is_safe() (  # no other user may rename this directory, or one above
  while [ "$(pwd -P)" != / ]; do
    cd -P .. || exit
    [ -n "$(find . -maxdepth 0 \( -user 0 -o -user "$(id -u)" \) \
      \( -perm -1000 -o ! -perm -0020 ! -perm -0002 \))" ] || exit
  done
)
is_safe || answer "error: other users may rename $parent or a directory above: choose another --stage-directory"

copies() { ls -1dtr env-*/ 2>/dev/null | tr -d /; }  # the least recently used first
is_older() { [ -n "$(find "$1" -maxdepth 0 -mmin "+$2" 2>/dev/null)" ]; }
free() { df -Pk . | awk 'NR == 2 { print $4 }'; }
total() { cat env-*/.complete 2>/dev/null | awk '{ sum += $1 } END { print sum + 0 }'; }
lacks_space() { [ "$(free)" -lt "$needed" ] || [ "$(($(total) + needed / 2))" -gt "$limit" ]; }
use() (
  command exec 9<"$name" && flock -s -w 0.5 9 && [ -e "$name/.complete" ] && touch "$name"
) 2>/dev/null
remove() (  # its age is read again once no job can be promised it
  is_older "$1" "$in_use" && command exec 9<"$1" && flock -n 9 && is_older "$1" "$in_use" &&
    mv "$1" ".removed-$1.$$" && rm -rf ".removed-$1.$$"
) 2>/dev/null

result=
if use; then result=complete; fi
rm -rf .removed-*
find . -maxdepth 1 -name 'env-*.tar' -mmin "+$in_use" -exec rm -f {} +
for copy in $(copies); do
  if [ ! -e "$copy/.complete" ] || is_older "$copy" "$unused"; then remove "$copy"; fi
done
[ -z "$result" ] || answer "$result"
for copy in $(copies); do
  lacks_space || break
  remove "$copy"
done
answer "free: $(free)"
"""
)
"""Shell script that finds the copy on a node, or else the space for it.

It prints an answer for `parse_answers`: "complete" if the node has the copy. Otherwise it removes unused copies and
answers "free: " and the number of free kilobytes, or "error: " and the reason.

Arguments: directory of all copies, name of this copy, kilobytes that the copy needs with its archive, maximum kilobytes
of all copies, minutes for which a copy is kept after a job has found it, minutes after which an unused copy is removed
even if there is space.
"""

UNPACK = (
    _COMMON
    + r"""
parent=$1 name=$2 archive=$3 program=$4 part=$5
cd "$parent" || exit
lock() {  # another job may have moved the directory away while this one waited
  for _ in 1 2 3 4 5; do
    mkdir -p "$name" && command exec 9<"$name" && flock "$1" 9 && [ "$name" -ef /proc/self/fd/9 ] && return
  done
  return 1
}
unpack() {
  find "$name" -mindepth 1 -delete && mkdir -p "$name/$part" && tar -xf "$archive" -C "$name/$part" || return
  if [ -x "$name/0/bin/conda-unpack" ]; then "$name/0/bin/python" "$name/0/bin/conda-unpack" || return; fi
  "$program" -c "" && du -sk "$name" | cut -f 1 >"$name/.complete"
}
make() {
  lock -s && [ -e "$name/.complete" ] && return
  lock -x || return
  [ -e "$name/.complete" ] || error=$(unpack 2>&1) ||
    { mv "$name" ".removed-$name.$$" && rm -rf ".removed-$name.$$"; return 1; }
}
error="$parent/$name cannot be locked"
if make; then
  touch "$name"
  result=complete
else
  result="error: $(printf '%s\n' "$error" | tail -n 2 | tr '\n' ' ' | cut -c -500)"
fi
rm -f "$archive"
answer "$result"
"""
)
"""Shell script that unpacks an archive into the copy, unless another job has done so, and removes the archive.

It prints an answer for `parse_answers`: "complete", or "error: " and the reason.

Arguments: directory of all copies, name of this copy, name of the archive, path of Python in the copy, which must run,
directory below the copy for the archive's files.
"""

LOCK_AND_RUN = r"""
command exec 9<"$0" && flock -s 9 && [ -O "$0" ] && [ -e "$0/.complete" ] && exec "$@"
echo "tf4slurm: $0, this node's copy of the environment, is gone. Start the job again." >&2
exit 1
"""
"""Shell script that runs a command from a copy, which is not removed until the command exits.

Arguments: the copy, the command.
"""


def parse_answers(output: str) -> dict[str, str]:
    """Return the answer of each node, by the node's name, from what the script `FIND` or `UNPACK` printed on all nodes.

    An answer is a text such as "complete" or "free: 1024" (see the scripts). Other lines, such as those of a site's
    TaskProlog, are ignored.
    """
    answers = (line.partition(_MARK)[2].split(maxsplit=1) for line in output.split("\n"))
    return {words[0]: words[1].strip() for words in answers if len(words) == 2}
