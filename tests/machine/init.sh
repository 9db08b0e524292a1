#!/bin/busybox sh
# First process of the virtual machine: loads modules, mounts the host's files under an overlay,
# sets up the RDMA link and runs the job; then the machine is switched off.
# Words on the kernel's command line are variables here: SHARE and KERNELS are writable folders of
# the host, by their names on the host.
export PATH=/bin
fail() { echo "init: $1"; reboot -f; }
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module parameters; do
    insmod "/modules/$module" $parameters || echo "init: no $module"
done < /modules/order

# Read-only, and unchanged while this runs, so it is cached without revalidation. Overlayfs would
# query attributes at each look-up.
common=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "ro,$common,cache=loose,noxattr" host /host || fail "cannot mount the host's files"
mount -t tmpfs -o size=75% changes /changes
mkdir /changes/upper /changes/work
layers=lowerdir=/layer:/host,upperdir=/changes/upper,workdir=/changes/work
mount -t overlay -o "$layers" machine /root || fail "cannot mount the overlay"
mount --move /proc /root/proc
mount --move /sys /root/sys
mount --move /dev /root/dev
mkdir -p /root/dev/shm /root/dev/pts
mount -t devpts devpts /root/dev/pts
for place in dev/shm run; do mount -t tmpfs -o mode=1777 tmpfs "/root/$place"; done
shared() {
    mkdir -p "/root$2"
    mount -t 9p -o "$common,cache=none" "$1" "/root$2" || fail "cannot mount $2"
}
shared share "$SHARE"
shared kernels "$KERNELS"
exec chroot /root /bin/sh "$SHARE/start"
