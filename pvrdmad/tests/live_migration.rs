//! A VMM moves a VM from one daemon to another in the middle of its traffic, in the order of Cloud Hypervisor, and with
//! the failures that can occur.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::moving_vm::MovingVm;
use crate::common::process::Daemon;
use crate::common::remote::probe;
use pvrdma_pci_function::PciFunction;
use pvrdmad::testing::{Pair, beside_traffic};
use tempfile::TempDir;

const MACS: [[u8; 6]; 2] = [[0x52, 0x54, 0, 0, 6, 1], [0x52, 0x54, 0, 0, 6, 2]];
const EINVAL: u32 = 22;

/// A daemon at one end of a link, with the devices of these numbers in one network.
struct Host {
    daemon: Daemon,
    folder: PathBuf,
}

impl Host {
    fn start(place: &Path, [own, other]: [&str; 2], devices: &[(u8, [u8; 6])]) -> Self {
        let folder = place.join(format!("{own}-sockets"));
        std::fs::create_dir(&folder).unwrap();
        let [near, far] = [own, other].map(|name| place.join(name).display().to_string());
        let mut command = Command::new(env!("CARGO_BIN_EXE_pvrdmad"));
        // With `strict`, a system call outside the filter kills the process, and the test fails.
        command.args(["--sandbox=strict", "--control"]).arg(folder.join("control"));
        command.arg("--network").arg(format!("name=a,uplink=unix-dgram:{near}:{far},mtu=9000"));
        for &(number, mac) in devices {
            let [socket, nic] = ["a", "nic"].map(|name| folder.join(format!("{name}{number}")));
            let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
            let place = format!("socket={},nic-socket={}", socket.display(), nic.display());
            command.arg("--device").arg(format!("name=a{number},network=a,{place},mac={mac},pin=off,address=any"));
        }
        Self { daemon: Daemon::start(command.stderr(Stdio::null())), folder }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// The VM of the second guest is copied beside its traffic, and its state is refused by a device with another MAC
/// address: it continues at the source. All traffic is compared meanwhile. Then the idle VM moves with its network
/// function, and its connection to the local peer that stays continues over the network.
#[test]
fn a_vm_moves_to_another_daemon() {
    let place: TempDir = tempfile::tempdir().unwrap();
    let [first, second] = [(1, MACS[0]), (2, MACS[1])];
    let mut source = Host::start(place.path(), ["left", "right"], &[first, second]);
    let stranger = (3, [0x52, 0x54, 0, 0, 6, 3]);
    let mut destination = Host::start(place.path(), ["right", "left"], &[second, stranger]);
    let vm = MovingVm::start(&source.socket("a2"), 16 << 20, 3);
    let nic = MovingVm::start(&source.socket("nic2"), 16 << 20, 1);
    let mut pair = Pair::with_macs([probe(&source.socket("a1"), 16 << 20), vm.probe()], MACS);
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
        assert_eq!(paused.restore(&destination.socket("a3"), &state).err(), Some(EINVAL));
        paused.resume();
    });
    pair.exchange();
    let mut version = [0; 4];
    vm.bar_read(1, 0, &mut version);
    // The log says that this is a migration, and not a snapshot.
    vm.begin();
    let (mut paused, mut paused_nic) = (vm.pause(), nic.pause());
    let (state, nic_state) = (paused.save(), paused_nic.save());
    let moved = paused.restore(&destination.socket("a2"), &state).unwrap();
    let moved_nic = paused_nic.restore(&destination.socket("nic2"), &nic_state).unwrap();
    paused.continue_at(moved);
    paused_nic.continue_at(moved_nic);
    for _ in 0..3 {
        pair.exchange();
    }
    source.daemon.stop();
    let mut again = [0; 4];
    vm.bar_read(1, 0, &mut again);
    assert!(version == again && version != [0; 4]);
    destination.daemon.stop();
}
