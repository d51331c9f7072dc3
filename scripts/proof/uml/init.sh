#!/bin/bash
# The first process of the guest. The host's tree is its root, read-only; what it writes goes to tmpfs and to /dev/ubda.
# L4_WORK, L4_CODE, L4_PYTHON and L4_EXPORT come from the kernel's command line.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
finish() { echo "L4 {\"broken\": \"$1\"}"; halt -f -d; }

mount -t proc proc /proc && mount -t sysfs sys /sys || finish "proc, sys"
for place in /run /tmp /var/lib/nfs; do mount -t tmpfs tmp "$place" || finish "tmpfs on $place"; done
mkdir -p /dev/shm /tmp/modules/lib /run/disk /run/netns /run/log /var/lib/nfs/{sm,sm.bak,v4recovery}
touch /var/lib/nfs/{etab,rmtab,xtab,state}
mount -t tmpfs tmp /dev/shm
mkdir /run/host && mount -t hostfs -o "$L4_WORK",ro none /run/host || finish "hostfs"
ln -s /usr/lib/uml/modules /tmp/modules/lib/modules
for module in veth nfsd nfs nfsv3 nfsv4; do modprobe -d /tmp/modules "$module" || finish "module $module"; done

# Two machines beside the server: each with its own network, host name and mounts, so that nothing is shared but the server.
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
for node in 0 1; do
  ip netns add "node$node"
  ip link add "veth$node" type veth peer name eth0 netns "node$node"
  ip addr add "10.0.$node.1/24" dev "veth$node" && ip link set "veth$node" up
  ip -n "node$node" addr add "10.0.$node.2/24" dev eth0
  ip -n "node$node" link set eth0 up && ip -n "node$node" link set lo up
  ip -n "node$node" route add default via "10.0.$node.1" || finish "network of node $node"
  nsenter --net="/run/netns/node$node" unshare -u -m sh -c "hostname node$node; echo \$\$ > /run/node$node; exec sleep 1000000" &
done
# Before the disk is mounted: a node with a copy of that mount would keep a dead file system alive.
for node in 0 1; do until [ -s "/run/node$node" ]; do sleep 0.05; done; done
echo 0 > /proc/sys/net/ipv4/tcp_max_orphans  # a closed socket forgets what it still had to send

mount /dev/ubda /run/disk || finish "the disk cannot be mounted"
mount -t nfsd nfsd /proc/fs/nfsd
rpcbind -w
exportfs -i -o "rw,${L4_EXPORT:-sync},no_root_squash,no_subtree_check,fsid=0" '*:/run/disk' || finish "exportfs"
echo 10 > /proc/fs/nfsd/nfsv4leasetime
echo 10 > /proc/fs/nfsd/nfsv4gracetime
rpc.nfsd 8 && rpc.mountd 2> /dev/null || finish "nfsd"

cd "$L4_CODE" || finish "no $L4_CODE"
export PYTHONPATH="$L4_CODE" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 RES_OPTIONS=attempts:0
"$L4_PYTHON" -m scripts.proof.uml.guest /run/host/plan.json 2>&1 || finish "the guest program failed"
halt -f -d
