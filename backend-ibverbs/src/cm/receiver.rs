//! The thread that receives for all devices.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags};

use super::Strays;
use super::message::{LONGEST, Received};
use super::umad::Umad;
use crate::adapter::bump;
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
    Worker::start("ibv-cm", move |stop| {
        if let Err(error) = receiver.run(stop) {
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
                // Without this a file that only has errors would be asked again and again.
                None if !arrived.contains(PollFlags::IN) => return Err(io::Error::other("the host's device is gone")),
                None => {}
            }
        }
    }

    fn take(&self, octets: &[u8]) {
        let Some(received) = Received::decode(octets) else { return bump(&self.strays.malformed) };
        let entry = self.gids.entry(received.gid_index);
        let owner =
            entry.and_then(|entry| Some((entry, self.fabric.owner_of(&entry).as_ref().and_then(Weak::upgrade)?)));
        let Some((entry, adapter)) = owner else {
            log::debug!("a management datagram of {} is for no guest", received.from);
            return bump(&self.strays.unowned);
        };
        let mut to = received.to;
        to.dgid = entry.gid;
        let (from, kind) = (received.from, entry.kind);
        let datagram = Datagram { from, to, kind, immediate: None, solicited: false, payload: received.mad };
        let delivered = adapter.gsi().is_some_and(|gsi| gsi.receive(&datagram));
        bump(if delivered { &adapter.counters.cm_received } else { &adapter.counters.gsi_dropped });
    }
}
