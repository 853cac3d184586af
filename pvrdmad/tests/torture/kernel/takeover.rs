//! Impersonates a peer that has left: with its address, its queue pair number and the agreed PSN.

use pvrdma_dev::testing::{Path, Request, SendWr, command_id as id};
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs_types::Sge;
use pvrdmad::testing::Target;

use super::{Kernel, Pair};

/// Upper limit of resets until a queue pair number is reused.
const ROUNDS: u32 = 256;

impl Kernel {
    pub(super) fn take_over(&mut self, victim: &Target) {
        let Some(pair) = self.reach(victim.peer_qpn) else { return };
        let index = 1 + self.dice.word() % 3;
        let bind = Request::new(id::CREATE_BIND).u32(16, 1024).u32(20, 0xfff).u32(24, index);
        // Another guest may have the address.
        self.command(&bind.set(28, &victim.peer.0).u8(44, 2));
        let path = Path {
            sgid_index: index as u8,
            timeout: 1,
            retry_cnt: 1,
            sq_psn: if self.dice.one_in(2) { victim.psn } else { self.dice.word() & 0xff_ffff },
            ..Path::to(victim.gid, victim.qpn)
        };
        self.connect_to(pair, &path);
        self.ask(pair, victim);
    }

    /// Restarts the driver until its first queue pair has this number.
    fn reach(&mut self, qpn: u32) -> Option<Pair> {
        for _ in 0..8 {
            self.begin();
            let first = *self.pairs.first()?;
            if first.qpn == qpn {
                return Some(first);
            }
            // Each restart advances the numbers by one or more.
            let rounds = (qpn.wrapping_sub(first.qpn) >> 16) % ROUNDS;
            (1..rounds.saturating_sub(2)).for_each(|_| self.machine.test.device.reset());
        }
        None
    }

    /// Posts a receive for the victim's data, and requests for the victim's memory.
    fn ask(&mut self, pair: Pair, victim: &Target) {
        self.reset_indices(pair);
        let key = self.regions.last().map_or(0, |region| region.1);
        let own = Sge { addr: 0, length: 64, lkey: key };
        let mut receive = SendWr::send(1, &[Sge { length: 1 << 15, ..own }]).encode(true);
        drop(receive.drain(16..80));
        self.publish(pair, true, &[receive], 0);
        let at = victim.addr + self.dice.below(4096) as u64;
        let requests = [SendWr::send(2, &[own]), SendWr::write(3, &[own], at, victim.rkey)];
        let requests = requests.map(|request| request.encode(true));
        let first = self.dice.below(2);
        self.publish(pair, false, &requests[first..], 0);
    }
}
