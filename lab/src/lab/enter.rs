//! Scripts of a guest whose commands run in the caller's own system.
//!
//! The guest boots the lab's system, whose tools set it up, and the caller's tree needs none of them: not even a C
//! library of the same kind. A command gets the tree as its root directory, in a mount namespace of its own.

use std::path::Path;

use super::script::quoted;

/// Place of the shared folder until a command's mount namespace has it at its own path.
pub(super) const FOLDER: &str = "/run/caller/folder";

/// Mounts the caller's tree, which is the second disk, with a writable layer over it.
pub(super) const MOUNT: &str = "\
cd /run && mkdir -p caller/lower caller/rw caller/root caller/folder || exit
mount -t ext4 -o ro /dev/vdb caller/lower && mount -t tmpfs tmpfs caller/rw || exit
mkdir caller/rw/upper caller/rw/work || exit
mount -t overlay -o lowerdir=caller/lower,upperdir=caller/rw/upper,workdir=caller/rw/work overlay caller/root || exit
cd / || exit";

/// Makes the tree the root directory. Everything after `pivot_root` is done in the tree, so that absolute links in it
/// lead to its own files. Busybox is static, and is called by its path: the tree may contain nothing but one program.
const ENTER: &str = "\
fail() { echo \"pvrdma-lab: cannot use --rootfs: $1\"; exit 126; }
old=/.pvrdma-lab
box=$old/bed/busybox
cd /run/caller/root && /bed/busybox mkdir -p .$old || fail 'its root directory'
/bed/busybox pivot_root . .$old && cd / || fail pivot_root
for part in dev proc sys; do
    $box mkdir -p /$part && $box mount -o rbind $old/$part /$part || fail /$part
done
$box mkdir -p /etc /run /root /lib/modules && $box mkdir -p -m 1777 /tmp || fail 'its folders'
$box mount -o bind $old/lib/modules /lib/modules || fail /lib/modules
$box cat $old/etc/hosts > /etc/hosts || fail /etc/hosts
$box mkdir -p \"$2\" && $box mount -o bind $old/run/caller/folder \"$2\" || fail \"$2\"
$box umount -l $old || fail umount
rmdir $old 2> /dev/null
[ -e /bin/sh ] && exec /bin/sh -c \"$1\"
eval \"$1\"";

/// Returns a script that runs another one in the tree, with the folder at its path.
pub(super) fn enter(script: &str, folder: &Path) -> String {
    let words = [ENTER, "enter", script, &folder.to_string_lossy()].map(quoted).join(" ");
    format!("exec unshare --mount --propagation private /bed/busybox sh -c {words}")
}
