//! What attackers know of their victims.

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_verbs::Gid;

use super::Dice;

/// Of which connections of test guests begin.
pub const PSN: u32 = 0x1234;

/// All that an attacker may want to know of a victim.
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
    /// Of which the connection begins.
    pub psn: u32,
    /// Its memory.
    pub addr: u64,
    /// The key to that.
    pub rkey: u32,
    /// Who talks to it.
    pub peer: Gid,
    /// The queue pair of that.
    pub peer_qpn: u32,
}

/// Victims that attackers know.
#[derive(Clone, Debug)]
pub struct Targets(Arc<Mutex<Known>>);

#[derive(Debug)]
struct Known {
    all: Vec<Target>,
    /// Those in front that never go.
    lasting: usize,
    /// Whose peer has gone, and may come again as another one.
    left: Option<Target>,
}

impl Targets {
    /// Of these, which stay.
    pub fn new(all: Vec<Target>) -> Self {
        Self(Arc::new(Mutex::new(Known { lasting: all.len(), all, left: None })))
    }

    /// One of them.
    pub fn pick(&self, dice: &mut Dice) -> Target {
        dice.pick(&self.0.lock().all)
    }

    /// Who was left, if anybody is.
    pub fn left(&self) -> Option<Target> {
        self.0.lock().left
    }

    /// A guest has come, with a connection.
    pub fn come(&self, ends: [Target; 2]) {
        let Known { all, lasting, .. } = &mut *self.0.lock();
        all.truncate(*lasting);
        all.extend(ends);
    }

    /// It has gone, and this is what it left at its peer.
    pub fn go(&self, left: Target) {
        let Known { all, lasting, left: place } = &mut *self.0.lock();
        all.truncate(*lasting);
        all.push(left);
        *place = Some(left);
    }

    /// Its peer has noticed.
    pub fn forget(&self) {
        self.0.lock().left = None;
    }
}
