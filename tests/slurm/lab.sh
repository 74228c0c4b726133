#!/bin/bash
# A real Slurm of several hosts on one Linux machine, for the tests. Needs root, slurm-wlm, munge, iproute2, util-linux;
# with ACCOUNTING=1 also slurmdbd, slurm-wlm-mysql-plugin and mariadb-server-core (no service of the system is used).
#
#   LAB=DIRECTORY lab.sh up               start the lab; its settings are the variables below
#   LAB=DIRECTORY lab.sh run COMMAND...   run COMMAND on the login host "ctl", where slurmctld runs too
#   LAB=DIRECTORY lab.sh on NODE COMMAND...
#   LAB=DIRECTORY lab.sh crash NODE       power off: the node sends nothing more, not even a FIN; then boot NODE
#   LAB=DIRECTORY lab.sh partition NODE   disconnect both interfaces; then heal NODE
#   LAB=DIRECTORY lab.sh slurmd NODE      start slurmd again, after it was killed
#   LAB=DIRECTORY lab.sh down             stop the lab and leave nothing, even if `up` failed
#   LAB=DIRECTORY lab.sh hold             up, wait for the end of stdin, down: the lab ends with the holder of the pipe
#
# Each host has its own network, UTS, PID and mount namespaces: eth0 SUBNET+i and ib0 IBNET+i (two bridges, both in
# ctl's namespace), host name, /etc/hosts, /etc/slurm, /run, /sys. Everything else is shared: / is the shared file system.
# Nothing has a name outside of the namespaces, so simultaneous labs need different values of LAB only.
set -Eeu
trap 'echo "lab.sh: code $? of line $LINENO: $BASH_COMMAND" >&2' ERR
LAB=${LAB:?is the directory of the lab}
NODES=${NODES:-"r1-n2 r1-n9 r1-n10 gpu-09"}      # in the order of slurm.conf
IP_VERSION=${IP_VERSION:-4}                      # 6: hosts have IPv6 addresses only
case $IP_VERSION in
  4) SUBNET=${SUBNET:-10.78.0.} IBNET=${IBNET:-172.29.0.} ETH_BITS=24 IB_BITS=16 NODAD= ;;
  6) SUBNET=${SUBNET:-fd00:78::} IBNET=${IBNET:-fd00:172::} ETH_BITS=64 IB_BITS=64 NODAD=nodad ;;
esac
CPUS=${CPUS:-8} GPUS=${GPUS:-4}                  # per node, simulated; GPUS >= 1
KILLWAIT=${KILLWAIT:-5} SLURMD_TIMEOUT=${SLURMD_TIMEOUT:-15}
HOST_SUFFIX=${HOST_SUFFIX:-}                     # host name = node name + suffix
RESOLVE=${RESOLVE:-1}                            # 0: node names do not resolve
PROCTRACK=${PROCTRACK:-linuxproc}                # cgroup (v1 only): also ends daemonised children of a job
CONSTRAIN=${CONSTRAIN:-0}                        # 1, with cgroup: tasks are limited to their CPUs, memory and GPUs
CONFIGLESS=${CONFIGLESS:-0}                      # 1: nodes have no slurm.conf, slurmd fetches it from slurmctld
ACCOUNTING=${ACCOUNTING:-0}                      # 1: slurmdbd with the lab's own MariaDB, on ctl, for sacct
EXTRA_CONF=${EXTRA_CONF:-}                       # lines of slurm.conf, in place of those below with the same key
UP_SECONDS=${UP_SECONDS:-40}
SETTINGS="NODES SUBNET IBNET CPUS GPUS KILLWAIT SLURMD_TIMEOUT HOST_SUFFIX PROCTRACK CONFIGLESS ETH_BITS IB_BITS NODAD"
CGROUPS="freezer cpuset memory devices cpuacct"

fail() { echo "lab.sh: $*" >&2; exit 1; }

within() {  # SECONDS COMMAND...
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do [ $SECONDS -lt $end ] || return 1; sleep 0.02; done
}

index() {
  local node i=0
  for node in $NODES; do i=$((i + 1)); if [ "$node" = "$1" ]; then echo $i; return; fi; done
  fail "no node '$1'; the nodes are: $NODES"
}

# The first process of a host. Process ids are reused, so the command line must name this lab. Not by $(<FILE): Bash
# exits without a message if the process ends between open and read.
init() {
  local outer= inner=
  { read -r outer <"$LAB/run/$1" && grep -qF -- "$LAB" "/proc/$outer/cmdline" &&
    { read -r inner <"/proc/$outer/task/$outer/children" || [ -n "$inner" ]; } && echo "${inner% }"; } 2>/dev/null
}

# Replaces this process by the command. That is impossible in the PID namespace, so there the command is killed when
# this process ends. With --outside the command stays out of that namespace, and signals to this process reach it.
enter() {
  local pid own="-p -- setpriv --pdeathsig KILL"
  [ "$1" != --outside ] || { own=; shift; }
  pid=$(init "$1") || fail "host $1 is not running"
  shift
  # shellcheck disable=SC2086
  exec nsenter -t "$pid" -m -u -n $own env -C "$PWD" -u LAB -u SLURM_CONF "$@"
}

power_on() {  # HOST HOSTNAME
  setsid unshare -m -u -n -p --fork --kill-child sh -c 'while sleep 1000; do :; done' "$LAB" </dev/null >/dev/null 2>&1 &
  echo $! >"$LAB/run/$1"
  within 20 init "$1" || fail "host $1 did not start"
  local cgroups=
  if [ "$PROCTRACK" = cgroup ] && [ "$1" != ctl ]; then cgroups=$CGROUPS; make_cgroups "$1"; fi
  (enter "$1" sh -euc '
    hostname "$3"
    mount -t tmpfs tmpfs /run
    mkdir /run/munge /run/slurm /run/slurmctld /run/slurmd
    mount --bind "$1/munge" /run/munge   # the only path that munge and unmunge use
    mount --bind "$1/hosts" /etc/hosts
    [ "$2" != ctl ] && [ "$5" = 1 ] || mount --bind "$1/etc" /etc/slurm
    # Without a name server an unknown name fails at once; the name server outside would time out.
    [ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
    for cgroup in $4; do mount --bind "/sys/fs/cgroup/$cgroup/$(basename "$1")-$2" "$1/cgroup/$cgroup"; done
    mount -t sysfs sysfs /sys            # /sys/class/net shows the interfaces of the namespace that mounted /sys
    [ -z "$4" ] || mount -t tmpfs tmpfs /sys/fs/cgroup
    for cgroup in $4; do
      mkdir "/sys/fs/cgroup/$cgroup"
      mount --move "$1/cgroup/$cgroup" "/sys/fs/cgroup/$cgroup"
    done
    [ "$2" = ctl ] || mount -t proc proc /proc   # on ctl, commands outside of the PID namespace need the old /proc
  ' sh "$LAB" "$1" "$2" "$cgroups" "$CONFIGLESS")
}

# Each node has its own part of each hierarchy of control groups.
make_cgroups() {  # HOST
  local cgroup directory file
  for cgroup in $CGROUPS; do
    directory=/sys/fs/cgroup/$cgroup/$(basename "$LAB")-$1
    mkdir -p "$directory" "$LAB/cgroup/$cgroup"
    [ $cgroup != cpuset ] || for file in cpuset.cpus cpuset.mems; do cat "$directory/../$file" >"$directory/$file"; done
  done
}

daemon() {  # HOST COMMAND...: the command becomes a daemon by itself
  local host=$1 log=$LAB/log/$2.$1; shift
  (cd / && enter "$host" "$@" >>"$log.out" 2>&1 </dev/null) ||
    fail "$1 does not start on $host: $(tail -q -n 10 "$log.out" "$log.log" 2>/dev/null)"
}

# A host that boots again keeps its MAC address: its neighbours cache the old one for half a minute and more.
mac() { printf 02:00:00:00:%02x:%02x "$@"; }  # NETWORK INDEX

boot() {  # NODE
  local i ctl node
  i=$(index "$1")
  power_on "$1" "$1$HOST_SUFFIX"
  ctl=$(init ctl) node=$(init "$1")
  nsenter -t "$ctl" -n ip -batch - <<END
link add eth-$i type veth peer name eth0 address $(mac 1 $i) netns $node
link add ib-$i type veth peer name ib0 address $(mac 2 $i) netns $node
link set eth-$i master eth0 up
link set ib-$i master ib-switch up
END
  nsenter -t "$node" -n ip -batch - <<END
link set lo up
addr add $SUBNET$i/$ETH_BITS dev eth0 $NODAD
addr add $IBNET$i/$IB_BITS dev ib0 $NODAD
link set eth0 up
link set ib0 up
route add default via ${SUBNET}254
END
  start_slurmd "$1"
}

start_slurmd() {  # NODE
  local server=
  mkdir -p "$LAB/spool/$1"
  [ "$CONFIGLESS" = 0 ] || server="--conf-server ctl"
  # shellcheck disable=SC2086
  daemon "$1" slurmd -N "$1" $server
}

cables() {  # NODE IP-LINK-ARGUMENTS: both interfaces, at ctl's end
  local i ctl cable
  i=$(index "$1"); ctl=$(init ctl); shift
  for cable in eth-$i ib-$i; do nsenter -t "$ctl" -n ip link "${@/CABLE/$cable}"; done
}

# All processes in the network namespace of a host: also those started by `run` and `on`.
processes() {
  local pid namespace
  pid=$(init "$1") && namespace=$(readlink "/proc/$pid/ns/net") || return 0
  [ "$namespace" != "$(readlink /proc/self/ns/net)" ] || return 0
  namespace=${namespace/[/\\[}
  find /proc/[0-9]*/ns/net -lname "${namespace/]/\\]}" 2>/dev/null | cut -d/ -f3
}

is_off() { ! init "$1"; }

power_off() {
  local ids outer
  ids=$(processes "$1")
  # shellcheck disable=SC2086
  [ -z "$ids" ] || kill -KILL $ids 2>/dev/null || true
  read -r outer <"$LAB/run/$1" || return 0
  if grep -qsF -- "$LAB" "/proc/$outer/cmdline"; then kill -KILL "$outer" 2>/dev/null || true; fi
  within 30 is_off "$1" || fail "host $1 does not end"
}

configure() {
  local node i=0 storage=none gather=none
  [ "$ACCOUNTING" = 0 ] || { storage=slurmdbd gather=linux; }
  { echo "127.0.0.1 localhost"
    echo "${SUBNET}254 ctl"
    for node in $NODES; do
      i=$((i + 1))
      [ "$RESOLVE" = 0 ] || echo "$SUBNET$i $node$HOST_SUFFIX $node"
      echo "$IBNET$i $node-ib"
    done
  } >"$LAB/hosts"
  dd if=/dev/urandom of="$LAB/munge/key" bs=128 count=1 status=none
  chmod 600 "$LAB/munge/key"
  cp -p "$LAB/munge/key" "$LAB/etc/slurm.key"   # for AuthType=auth/slurm
  # Slurm counts plain files too, but sets CUDA_VISIBLE_DEVICES for character devices only.
  for ((i = 0; i < GPUS; i++)); do mknod "$LAB/dev/nvidia$i" c 195 $i; done
  echo "Name=gpu File=$LAB/dev/nvidia[0-$((GPUS - 1))]" >"$LAB/etc/gres.conf"
  { printf 'CgroupPlugin=cgroup/v1\n'
    [ "$CONSTRAIN" = 0 ] || printf 'Constrain%s=yes\n' Cores RAMSpace Devices
  } >"$LAB/etc/cgroup.conf"
  cat >"$LAB/etc/slurm.conf" <<END
ClusterName=lab
SlurmctldHost=ctl(${SUBNET}254)
AuthType=auth/munge
AuthInfo=socket=$LAB/munge/munge.socket.2,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.ctl.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
SlurmctldDebug=verbose
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MpiParams=ports=23000-23999
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=$SLURMD_TIMEOUT
InactiveLimit=0
KillWait=$KILLWAIT
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/$storage
AccountingStorageHost=ctl
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/$gather
JobAcctGatherFrequency=task=1
DefMemPerCPU=100
SlurmdParameters=config_overrides
END
  i=0
  for node in $NODES; do
    i=$((i + 1))
    echo "NodeName=$node NodeAddr=$SUBNET$i CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS" \
      "ThreadsPerCore=1 RealMemory=16000 Gres=gpu:$GPUS State=UNKNOWN"
  done >>"$LAB/etc/slurm.conf"
  cat >>"$LAB/etc/slurm.conf" <<END
PartitionName=debug Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low   Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=8
PartitionName=lowc  Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=8
PartitionName=high  Nodes=ALL PriorityTier=20 PreemptMode=OFF
$EXTRA_CONF
END
  # Of lines with the same key the last one stays, in the place of the first.
  awk '{ key = $1; if (key !~ /^(Node|Partition)Name=/) sub(/=.*/, "", key)
         if (!(key in line)) keys[++n] = key; line[key] = $0 }
       END { for (i = 1; i <= n; i++) print line[keys[i]] }' "$LAB/etc/slurm.conf" >"$LAB/etc/new"
  mv "$LAB/etc/new" "$LAB/etc/slurm.conf"
}

# The database listens on its socket only, at the path that Slurm's plugin uses; /run is private to ctl. At its start
# mariadbd deletes the temporary tables that it finds, so each lab has its own directory for them.
account() {
  cat >"$LAB/etc/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$LAB/munge/munge.socket.2
DbdHost=ctl
SlurmUser=root
LogFile=$LAB/log/slurmdbd.ctl.log
PidFile=$LAB/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
END
  chmod 600 "$LAB/etc/slurmdbd.conf"
  local socket=/run/mysqld/mysqld.sock log=$LAB/log/mariadbd.ctl.log
  local server="mariadbd --no-defaults --user=root --datadir=$LAB/database --tmpdir=$LAB/tmp --innodb-log-file-size=8M"
  mkdir "$LAB/database" "$LAB/tmp"
  { printf 'create database mysql;\nuse mysql;\n'; cat /usr/share/{mysql/mysql,mariadb/mariadb}_system_tables.sql 2>/dev/null; } | $server --bootstrap >"$log" 2>&1 ||
    fail "no database: $(tail -n 10 "$log")"
  on_ctl ln -s mysqld /run/mariadbd   # the path of later versions
  on_ctl mkdir /run/mysqld
  # shellcheck disable=SC2086
  (cd / && enter ctl setsid $server --socket=$socket --skip-networking --skip-grant-tables >>"$log" 2>&1 </dev/null) &
  within "$UP_SECONDS" on_ctl test -S $socket || fail "mariadbd does not start: $(tail -n 10 "$log")"
  daemon ctl slurmdbd
  within "$UP_SECONDS" on_ctl timeout 5 sacctmgr -n show cluster ||
    fail "slurmdbd does not answer: $(tail -n 10 "$LAB/log/slurmdbd.ctl.log")"
  on_ctl sacctmgr -i add cluster lab >"$LAB/log/sacctmgr.log" 2>&1 || fail "$(cat "$LAB/log/sacctmgr.log")"
}

on_ctl() { (enter ctl "$@"); }

all_idle() {
  local node
  for node in $NODES; do
    [ "$( (enter ctl timeout 5 sinfo -h -p debug -n "$node" -o %T) 2>/dev/null)" = idle ] || { NOT_IDLE=$node; return 1; }
  done
}

up() {
  local setting node
  local cgroup
  for cgroup in $CGROUPS; do
    [ "$PROCTRACK" != cgroup ] || [ -d "/sys/fs/cgroup/$cgroup" ] || fail "PROCTRACK=cgroup needs /sys/fs/cgroup/$cgroup"
  done
  mkdir -p "$LAB"/{dev,etc,log,munge,run,spool,state}
  chmod 755 "$LAB" "$LAB/munge"
  for setting in $SETTINGS; do echo "$setting=${!setting@Q}"; done >"$LAB/settings"
  configure
  power_on ctl ctl
  nsenter -t "$(init ctl)" -n ip -batch - <<END
link set lo up
link add eth0 address $(mac 1 254) type bridge
link add ib-switch type bridge
addr add ${SUBNET}254/$ETH_BITS dev eth0 $NODAD
link set eth0 up
link set ib-switch up
END
  daemon ctl munged --num-threads=2 --key-file="$LAB/munge/key" --socket="$LAB/munge/munge.socket.2" \
    --pid-file="$LAB/munge/munged.pid" --log-file="$LAB/log/munged.ctl.log" --seed-file="$LAB/munge/munged.seed"
  [ "$ACCOUNTING" = 0 ] || account
  daemon ctl slurmctld -c
  for node in $NODES; do boot "$node"; done
  if ! within "$UP_SECONDS" all_idle; then
    tail -n 20 "$LAB/log/slurmctld.ctl.log" "$LAB/log/slurmd.$NOT_IDLE.log" >&2 || true   # one may not exist
    fail "node $NOT_IDLE is not idle after $UP_SECONDS s; the ends of both logs are above"
  fi
}

down() {
  local host cgroup
  for host in $NODES ctl; do [ ! -e "$LAB/run/$host" ] || power_off "$host"; done
  for cgroup in $CGROUPS; do
    cgroup=/sys/fs/cgroup/$cgroup
    [ ! -d $cgroup ] || find $cgroup -depth -type d -path "$cgroup/$(basename "$LAB")-*" -delete 2>/dev/null || true
  done
  rm -rf --one-file-system "$LAB"
}

verb=${1:-help}; shift || true
case $verb in
  up | hold) [ ! -e "$LAB/settings" ] || fail "$LAB is a lab already; end it with: down" ;;
  help) ;;
  *) [ -e "$LAB/settings" ] || fail "no lab in $LAB; start it with: up"; . "$LAB/settings" ;;
esac
case $verb in
  up) up ;;
  hold) trap down EXIT; up; touch "$LAB/run/is-up"; cat >/dev/null ;;
  down) down ;;
  run) enter --outside ctl "$@" ;;
  on) index "$1" >/dev/null; enter "$@" ;;
  boot) is_off "$1" || fail "$1 is running"; boot "$1" ;;
  crash) cables "$1" del CABLE; power_off "$1" ;;
  partition) cables "$1" set CABLE down ;;
  heal) cables "$1" set CABLE up ;;
  slurmd) start_slurmd "$1" ;;
  *) sed -n '2,15p' "$0" ;;
esac
