//! RoCE v1, which the kernel's implementation does not support, between two daemons.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::programs::{self, CONNECTED, DATAGRAMS, MANAGED, Program};
use super::shared::{Machines, Shared};
use super::two_daemons::TwoDaemons;
use crate::guest_with_daemon::{HostOptions, IPV4, cable, datagrams};
use crate::pair::PVRDMA_DEVICE;

/// Without and with a VLAN tag. Both ends are equal, so one direction is enough.
pub(crate) fn cases() -> Vec<Case> {
    let programs: Vec<Program> = CONNECTED.into_iter().chain(DATAGRAMS).map(Program::one_way).collect();
    let few: Vec<Program> = MANAGED.into_iter().chain(DATAGRAMS).map(Program::one_way).collect();
    let untagged = Shared::new(|image| TwoDaemons::boot(image, 1500, |directory, end| cabled(directory, end, "")));
    let tagged =
        Shared::new(|image| TwoDaemons::boot(image, 1500, |directory, end| cabled(directory, end, ",vlan=42")));
    let group = |name: &str, programs: &[Program], both: &Rc<Shared<TwoDaemons>>| {
        let mut cases = vec![both.case(format!("{name}/gids"), all_gids_are_v1)];
        cases.extend(programs::cases(name, programs, both, |both: &TwoDaemons, program, server| {
            program.run(&both.endpoints(IPV4.map(Into::into), None)?, server)
        }));
        cases
    };
    let mut cases = group("roce-v1/untagged", &programs, &untagged);
    cases.extend(group("roce-v1/tagged", &few, &tagged));
    cases.push(tagged.case("roce-v1/tagged/nothing-without-a-tag", nothing_without_a_tag));
    cases
}

/// Neither end accepts untagged frames. So the frames that they accept from each other are tagged.
fn nothing_without_a_tag(both: &TwoDaemons) -> Result<String> {
    let cable = cable(both.directory());
    for (guest, uplink) in both.guests().iter().zip(cable) {
        let dropped = || guest.counter("passed_dropped_vlan");
        let before = dropped()?;
        // A broadcast frame of an unknown protocol.
        let mut frame = [0_u8; 60];
        frame[..6].fill(0xff);
        frame[6..14].copy_from_slice(&[0x52, 0x54, 0, 0, 2, 9, 0x88, 0xb5]);
        let socket = UnixDatagram::unbound().context("cannot make a socket")?;
        socket.send_to(&frame, &uplink).with_context(|| format!("cannot send to {}", uplink.display()))?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while dropped()? == before {
            if Instant::now() > deadline {
                bail!("{}: a frame without a tag is not dropped", guest.vm().name());
            }
        }
    }
    Ok(String::new())
}

/// All GIDs of both guests are of RoCE v1, on which the cases after this one rely.
fn all_gids_are_v1(both: &TwoDaemons) -> Result<String> {
    // Waits for the GIDs.
    both.endpoints(IPV4.map(Into::into), None)?;
    for vm in both.vms() {
        // Unused entries cannot be read.
        let types =
            vm.run(&format!("cat /sys/class/infiniband/{PVRDMA_DEVICE}/ports/1/gid_attrs/types/* 2>&-; true"))?;
        if types.is_empty() || types.lines().any(|line| line != "IB/RoCE v1") {
            bail!("{}: {types}", vm.name());
        }
    }
    Ok(String::new())
}

/// Returns the options of a host whose uplink is one end of a cable. `more` are keys of the network.
fn cabled(directory: &Path, end: usize, more: &str) -> HostOptions {
    let cable = cable(directory);
    let uplink = datagrams(&cable[end], &cable[1 - end]);
    HostOptions { device: ",roce=v1".to_owned(), ..HostOptions::new(format!("uplink={uplink}{more}")) }
}
