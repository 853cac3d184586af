//! Knowledge of attackers about their victims.

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_verbs_types::Gid;

use super::Dice;

/// First PSN of the connections of test guests.
pub const PSN: u32 = 0x1234;

/// Everything that an attacker may know about a victim.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The number of its guest.
    pub number: u8,
    /// Its address.
    pub gid: Gid,
    /// Its queue pair.
    pub qpn: u32,
    /// Its queue pair for datagrams.
    pub datagram_qpn: u32,
    /// First PSN of its connection.
    pub psn: u32,
    /// Its memory.
    pub addr: u64,
    /// The key to that.
    pub rkey: u32,
    /// Address of its peer.
    pub peer: Gid,
    /// Queue pair of its peer.
    pub peer_qpn: u32,
}

/// Victims known to attackers.
#[derive(Clone, Debug)]
pub struct Targets(Arc<Mutex<Known>>);

#[derive(Debug)]
struct Known {
    all: Vec<Target>,
    /// The number of victims, at the front of the list, that stay.
    lasting: usize,
    /// A victim whose peer has gone, and may return as another guest.
    left: Option<Target>,
}

impl Targets {
    /// Creates a list of victims that stay.
    pub fn new(all: Vec<Target>) -> Self {
        Self(Arc::new(Mutex::new(Known { lasting: all.len(), all, left: None })))
    }

    /// Returns one of the victims.
    pub fn pick(&self, dice: &mut Dice) -> Target {
        dice.pick(&self.0.lock().all)
    }

    /// Returns the victim whose peer has gone, if there is one.
    pub fn left(&self) -> Option<Target> {
        self.0.lock().left
    }

    /// Adds both ends of a guest's new connection.
    pub fn come(&self, ends: [Target; 2]) {
        let Known { all, lasting, .. } = &mut *self.0.lock();
        all.truncate(*lasting);
        all.extend(ends);
    }

    /// Removes a guest that has gone. `left`: the end at its peer.
    pub fn go(&self, left: Target) {
        let Known { all, lasting, left: place } = &mut *self.0.lock();
        all.truncate(*lasting);
        all.push(left);
        *place = Some(left);
    }

    /// Forgets the end of a peer that has closed the connection.
    pub fn forget(&self) {
        self.0.lock().left = None;
    }
}
