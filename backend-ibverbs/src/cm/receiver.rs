//! Receiving thread for all devices.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pvrdma_base::threads::ThreadKind;
use rustix::event::{PollFd, PollFlags};

use super::message::{LONGEST, Received};
use super::umad::Umad;
use crate::counters::{Strays, bump};
use crate::datagram::Datagram;
use crate::gid::{Fabric, HostGids};
use crate::worker::{Worker, wait};

struct Receiver {
    file: Umad,
    gids: HostGids,
    fabric: Arc<Fabric>,
    strays: Arc<Strays>,
}

pub(super) fn start(file: Umad, gids: HostGids, fabric: Arc<Fabric>, strays: Arc<Strays>) -> io::Result<Worker> {
    let receiver = Receiver { file, gids, fabric, strays };
    Worker::start(ThreadKind::HostManagement, "ibv-cm", move |stop| {
        if let Err(error) = receiver.run(stop) {
            // Log: the last of this thread.
            log::error!("the connection manager receives nothing any more: {error}");
        }
    })
}

impl Receiver {
    fn run(&self, stop: &OwnedFd) -> io::Result<()> {
        let mut room = vec![0; LONGEST];
        loop {
            let mut files = [PollFd::new(stop, PollFlags::IN), PollFd::new(&self.file, PollFlags::IN)];
            wait(&mut files)?;
            let [stopped, arrived] = files.map(|file| file.revents());
            if !stopped.is_empty() {
                return Ok(());
            }
            match self.file.read(&mut room)? {
                Some(length) => self.take(room.get(..length).unwrap_or_default()),
                // Without this, a file that only reports errors would be polled in a busy loop.
                None if !arrived.contains(PollFlags::IN) => return Err(io::Error::other("the host's device is gone")),
                None => {}
            }
        }
    }

    fn take(&self, bytes: &[u8]) {
        let Some(received) = Received::decode(bytes) else { return bump(&self.strays.cm_process_malformed) };
        let entry = self.gids.entry(received.gid_index);
        let owner = entry.and_then(|entry| Some((entry, self.fabric.owner_of(&entry)?)));
        let Some((entry, member)) = owner else {
            log::debug!("a management datagram of {} is for no guest", received.from);
            return bump(&self.strays.cm_process_unowned);
        };
        if !member.rules.allow_peer(received.from) {
            return bump(&member.counters.peers_refused);
        }
        let mut to = received.to;
        to.dgid = entry.gid;
        let (from, kind) = (received.from, entry.kind);
        let datagram = Datagram { from, to, kind, immediate: None, solicited: false, payload: received.mad };
        let delivered = member.receive(&datagram);
        bump(if delivered { &member.counters.cm_received } else { &member.counters.gsi_dropped });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use pvrdma_verbs::{Peers, Rules, testing::gid};
    use pvrdma_verbs_types::{Gid, GidType};
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::gid::{Bound, DatagramReceiver, HostGid, Member};

    /// GSI queue pair of a guest.
    #[derive(Default)]
    struct Guest(parking_lot::Mutex<Vec<Gid>>);

    impl DatagramReceiver for Guest {
        fn receive(&self, datagram: &Datagram) -> bool {
            self.0.lock().push(datagram.from);
            true
        }
    }

    /// A datagram of a network peer does not reach a guest whose rules exclude the peer.
    #[test]
    fn a_guest_receives_from_its_peers_only() {
        let (flags, folder) = (SocketFlags::NONBLOCK, tempfile::tempdir().unwrap());
        let (kernel, ours) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let gids = HostGids::in_folder(folder.path());
        let own = HostGid { index: 3, gid: gid(1), kind: GidType::RoceV2 };
        gids.set(&own);
        let peers = Peers(vec!["10.0.0.2".parse().unwrap()]);
        let member = Arc::new(Member { rules: Rules::default().with_peers(peers), ..Member::default() });
        let guest = Arc::new(Guest::default());
        let receiver: Weak<dyn DatagramReceiver> = Arc::downgrade(&(Arc::clone(&guest) as Arc<dyn DatagramReceiver>));
        *member.gsi.lock() = Some(receiver);
        let fabric = Arc::<Fabric>::default();
        fabric.bind(&member, Bound { gid: own.gid, kind: own.kind, host: own }).unwrap();
        for from in [2, 3] {
            let mut bytes = vec![0; 320];
            (bytes[23], bytes[32], bytes[33]) = (1, 1, 3);
            bytes[36..52].copy_from_slice(&gid(from).0);
            bytes[64..68].copy_from_slice(&[1, 7, 2, 3]);
            rustix::io::write(&kernel, &bytes).unwrap();
        }
        drop(kernel);
        let receiver = Receiver { file: Umad::stand_in(ours), gids, fabric, strays: Arc::default() };
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(receiver.run(&stop).is_err());
        assert_eq!(*guest.0.lock(), [gid(2)]);
        assert_eq!((member.counters.cm_received.get(), member.counters.peers_refused.get()), (1, 1));
    }

    #[test]
    fn counts_undeliverable_datagrams_and_ends_with_the_device() {
        let (flags, folder) = (SocketFlags::NONBLOCK, tempfile::tempdir().unwrap());
        let (kernel, ours) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let gids = HostGids::in_folder(folder.path());
        gids.set(&HostGid { index: 3, gid: Gid([9; 16]), kind: GidType::RoceV2 });
        let mut good = vec![0; 320];
        // QP 1, a network header, the index, and the connection manager's class.
        (good[23], good[32], good[33]) = (1, 1, 3);
        good[64..68].copy_from_slice(&[1, 7, 2, 3]);
        let mut elsewhere = good.clone();
        elsewhere[33] = 4;
        for bytes in [&good[..], &elsewhere, &good[..319], &[0; 320], &[0; 2112], &[0]] {
            rustix::io::write(&kernel, bytes).unwrap();
        }
        drop(kernel);
        let strays = Arc::<Strays>::default();
        let receiver =
            Receiver { file: Umad::stand_in(ours), gids, fabric: Arc::default(), strays: Arc::clone(&strays) };
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert_eq!(receiver.run(&stop).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!((strays.cm_process_unowned.get(), strays.cm_process_malformed.get()), (2, 4));
    }
}
