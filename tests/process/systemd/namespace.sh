#!/bin/bash
# Runs systemd as process 1 of its own namespaces (mounts, processes, cgroups). The network is shared
# with this machine. systemd and all services end with standard input.
#
# Usage: unshare --mount bash namespace.sh DIRECTORY SYSTEMD
# DIRECTORY holds `etc`, `bin` and `units`, copied to /etc, /usr/local/bin and the only units, and
# `state`, mounted as /var/lib/uniffle-worker. DIRECTORY/pid gets the id of systemd's parent process.
set -euo pipefail
directory=$1 systemd=$2

if [ "${3-}" = inside ]; then
    mount -t proc proc /proc
    for at in /run /etc /var /usr/local/bin; do mount -t tmpfs tmpfs "$at"; done
    cp "$directory"/etc/* /etc/
    cp "$directory/bin/uniffle-worker" /usr/local/bin/
    mkdir -p /run/units /etc/uniffle-worker /var/lib/uniffle-worker
    cp -r "$directory"/units/* /run/units/
    mount --rbind "$directory/state" /var/lib/uniffle-worker
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    exec env -i PATH="$PATH" container=test SYSTEMD_UNIT_PATH=/run/units \
        "$systemd" --system --unit=basic.target --log-target=null --show-status=no
fi

mount --make-rprivate /
mkdir "$directory/cgroup"
mount -t cgroup2 cgroup2 "$directory/cgroup"
outer=$directory/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
own=$directory/cgroup/uniffle-worker-test-$$
leave() {
    if [ -n "${init-}" ]; then
        # The kernel ends all processes of the namespace before process 1 is reaped.
        kill -KILL $(cat "/proc/$init/task/$init/children") || true
        wait "$init" || true
    fi
    echo $$ >"$outer/cgroup.procs" || echo $$ >"$directory/cgroup/cgroup.procs"
    find "$own" -depth -type d -exec rmdir {} +
}
mkdir "$own"
trap leave EXIT
echo $$ >"$own/cgroup.procs"
unshare --fork --pid --mount --cgroup --ipc --uts bash "$0" "$directory" "$systemd" inside </dev/null &
init=$!
echo "$init" >"$directory/pid.new"
mv "$directory/pid.new" "$directory/pid"
cat >/dev/null
