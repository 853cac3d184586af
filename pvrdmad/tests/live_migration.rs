//! A VMM moves a VM from one daemon to another in the middle of its traffic, in the order of Cloud Hypervisor, and with
//! the failures that can occur.

use std::path::Path;

use crate::common::daemon::{Running, TestDaemon};
use crate::common::moving_vm::MovingVm;
use crate::common::traffic::mac;
use pvrdma_pci_function::PciFunction;
use pvrdmad::testing::{Pair, beside_traffic};

const EINVAL: u32 = 22;

/// A daemon at one end of a link, with the devices of these numbers in one network.
fn start(links: &Path, [own, other]: [&str; 2], numbers: [u8; 2]) -> Running {
    let [near, far] = [own, other].map(|name| links.join(name).display().to_string());
    let daemon = TestDaemon::new().network("a", &format!("uplink=unix-dgram:{near}:{far},mtu=9000"));
    let device = |daemon: TestDaemon, number| {
        let keys = format!("network=a,nic-socket=FOLDER/nic{number},address=any");
        daemon.device(&format!("a{number}"), number, &keys)
    };
    numbers.into_iter().fold(daemon, device).start()
}

/// The VM of the second guest is copied beside its traffic, and its state is refused by a device with another MAC
/// address: it continues at the source. All traffic is compared meanwhile. Then the idle VM moves with its network
/// function, and its connection to the local peer that stays continues over the network.
#[test]
fn a_vm_moves_to_another_daemon() {
    let links = tempfile::tempdir().unwrap();
    let mut source = start(links.path(), ["left", "right"], [1, 2]);
    let mut destination = start(links.path(), ["right", "left"], [2, 3]);
    let vm = MovingVm::start(&source.path("a2"), 16 << 20, 3);
    let nic = MovingVm::start(&source.path("nic2"), 16 << 20, 1);
    let mut pair = Pair::with_macs([source.probe("a1"), vm.probe()], [1, 2].map(mac));
    let pages = pair.written_pages();
    beside_traffic(&mut pair, || {
        let mut copy = vm.begin();
        let written: usize = (0..5).map(|_| vm.copy_round(&mut copy)).sum();
        assert!(written > 0);
        let mut paused = vm.pause();
        let state = paused.save();
        paused.last_round(&mut copy);
        for &page in &pages {
            assert!(vm.is_copied(&copy, page), "{page:#x} was not reported");
        }
        assert_eq!(paused.restore(&destination.path("a3"), &state).err(), Some(EINVAL));
        paused.resume();
    });
    pair.exchange();
    let mut version = [0; 4];
    vm.bar_read(1, 0, &mut version);
    // The log says that this is a migration, and not a snapshot.
    vm.begin();
    let (mut paused, mut paused_nic) = (vm.pause(), nic.pause());
    let (state, nic_state) = (paused.save(), paused_nic.save());
    let moved = paused.restore(&destination.path("a2"), &state).unwrap();
    let moved_nic = paused_nic.restore(&destination.path("nic2"), &nic_state).unwrap();
    paused.continue_at(moved);
    paused_nic.continue_at(moved_nic);
    for _ in 0..3 {
        pair.exchange();
    }
    source.stop();
    let mut again = [0; 4];
    vm.bar_read(1, 0, &mut again);
    assert!(version == again && version != [0; 4]);
    destination.stop();
}
