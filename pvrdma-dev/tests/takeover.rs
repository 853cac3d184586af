//! A kernel that ends without resetting the device, and the next kernel, which finds the device as it was left.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;

use common::{Process, connect, gid, rxe_device, rxe_member};
use pvrdma_dev::testing::{GuestMemory, MEMORY_BASE, Path, RecvWr, SendWr, access, status};
use pvrdma_rxe::{Rxe, RxeConfig};

/// Memory of the guest whose kernel is replaced, in bytes.
const BYTES: usize = 16 << 20;

/// Messages on their way when it does.
const MESSAGES: u32 = 64;

/// Bytes of each.
const MESSAGE: usize = 1 << 20;

/// Conformance 11, 71: kexec, where the PCI core has disabled bus mastering, and kdump, where it has not (spec §3.3).
/// The second kernel finds a device in the middle of a transfer. From then on the first kernel's memory does not change
/// and no interrupt for it is raised; its peer's requests end; and the device works for the second kernel.
#[test]
fn kexec_and_kdump() {
    let backend = Arc::new(Rxe::new(RxeConfig::default()).unwrap());
    let (_far, peer) = rxe_member(&backend, 1, GuestMemory::new(64 << 20));
    let mut there = Process::new(&peer, true, 2 * MESSAGES);
    let (source, lkey) = peer.registered_buffer(&there.pd, MESSAGE, access::ALL).unwrap();
    for kdump in [false, true] {
        let (test, old) = rxe_member(&backend, 2, GuestMemory::new(BYTES));
        let here = Process::new(&old, true, 2 * MESSAGES);
        let (target, rkey) = old.registered_buffer(&here.pd, MESSAGE, access::ALL).unwrap();
        let (mut sender, mut receiver) = (there.rc(), here.rc());
        let impatient = Path { timeout: 1, retry_cnt: 1, rnr_retry: 1, ..Path::to(gid(2), receiver.qpn) };
        receiver.connect(&Path::to(gid(1), sender.qpn)).unwrap();
        sender.connect(&impatient).unwrap();
        receiver.post_recv(&vec![RecvWr::new(1, &[]); 32]).unwrap();
        here.cq.arm();
        let write = |wr_id| SendWr::write(wr_id, &[source.sge(&lkey, 0, MESSAGE)], target.va(), rkey.rkey);
        sender.post_send(&(0..MESSAGES.into()).map(write).collect::<Vec<_>>()).unwrap();

        // The first kernel is gone. The second kernel's driver enables bus mastering long before its handshake, when
        // memory already has other content.
        let new = kdump.then(|| test.driver());
        if !kdump {
            old.pci().set_bus_master(false);
            target.fill(0x55);
            old.pci().set_bus_master(true);
        }
        let everything = || (test.memory.read_vec(MEMORY_BASE, BYTES), test.irqs.counts());
        let before = everything();
        let ends = there.cq.wait_many(MESSAGES as usize);
        // A write in progress when memory disappeared is refused; later requests get no answer.
        let how = [status::SUCCESS, status::REM_ACCESS, status::RETRY_EXC, status::WR_FLUSH];
        let statuses: Vec<_> = ends.iter().map(|cqe| cqe.status).collect();
        assert!(statuses.iter().all(|status| how.contains(status)), "kdump {kdump}: {statuses:?}");
        receiver.ring_send();
        receiver.ring_recv();
        here.cq.arm();
        assert!(everything() == before, "kdump {kdump}: something of the first kernel's goes on");
        assert_eq!(test.device.status().objects, rxe_device().device.status().objects);
        sender.destroy().unwrap();

        let new = new.unwrap_or_else(|| test.driver());
        new.bind_gid(0, gid(2)).unwrap();
        let mut second = Process::new(&new, true, 16);
        let (mut theirs, mut ours) = (there.rc(), second.rc());
        connect(&mut theirs, 1, &mut ours, 2);
        ours.post_recv(&[RecvWr::new(1, &[])]).unwrap();
        theirs.post_recv(&[RecvWr::new(2, &[])]).unwrap();
        theirs.post_send(&[SendWr::send(3, &[])]).unwrap();
        ours.post_send(&[SendWr::send(4, &[])]).unwrap();
        for cq in [&mut second.cq, &mut there.cq] {
            assert!(cq.wait_many(2).iter().all(|cqe| cqe.status == status::SUCCESS));
        }
        theirs.destroy().unwrap();
        new.remove();
    }
}
