//! QEMU's own vmxnet3 beside the PVRDMA device, with the daemon between the vNIC and the uplink (`nic=`): five cases in
//! place of all those that other groups run with both functions of the daemon.

use anyhow::{Result, ensure};

use super::case::Case;
use super::programs::{self, SMOKE};
use super::shared::{Machines, Shared};
use super::two_daemons::TwoDaemons;
use crate::guest_with_daemon::{HostOptions, IPV4, cable, datagrams};

/// Four programs, and IP.
pub(crate) fn cases() -> Vec<Case> {
    let both = Shared::new(|image| {
        TwoDaemons::boot(image, 1500, |directory, end| {
            let cable = cable(directory);
            let network = format!("uplink={}", datagrams(&cable[end], &cable[1 - end]));
            HostOptions { qemu_nic: true, ..HostOptions::new(network) }
        })
    });
    let mut cases = programs::cases("qemu-nic", &SMOKE, &both, |both: &TwoDaemons, program, server| {
        program.run(&both.endpoints(IPV4.map(Into::into), None)?, server)
    });
    cases.push(both.case("qemu-nic/ping", ping));
    cases
}

/// Packets of one frame and of several pass between the two vNICs.
fn ping(both: &TwoDaemons) -> Result<String> {
    let before = both.counter("passed_out")?;
    for size in [56, 1472, 9000] {
        both.vms()[0].run(&format!("ping -n -q -c 5 -i 0.01 -W 20 -s {size} {}", IPV4[1]))?;
    }
    let passed = both.counter("passed_out")? - before;
    ensure!(passed >= 2 * 5 * 9, "only {passed} frames passed through the daemons");
    Ok(format!("{passed} frames"))
}
