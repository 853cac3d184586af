//! The host's own adapter with a real guest on it: a guest acts as the host, and boots a guest of its own.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result};

use super::case::Case;
use super::host_adapter::{DEVICE, IP, PlayedHost, TOOLS, nothing_left};
use super::kernel_log;
use crate::daemon;
use crate::endpoints::gid_index;
use crate::image::Disk;
use crate::image::GuestImage;
use crate::vm::Vm;

/// Address of the guest, which the adapter has as well.
const GUEST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 80, 7));
/// Memory in MiB, enough for the inner guest.
const MEMORY_MIB: u32 = 2560;
const LIMIT: Duration = Duration::from_secs(1500);

/// Takes minutes, most of them for the boot of an emulated machine in an emulated machine.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("slow/nested", on_rxe).slow("takes minutes; runs when asked for: --only nested")]
}

fn on_rxe(image: &GuestImage) -> Result<String> {
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let disk = Disk::new(directory.path())?;
    disk.add(&daemon::program()?, "pvrdmad")?;
    disk.add(&std::env::current_exe().context("cannot find this program")?, "guest-tests")?;
    image.pack(&disk, "image")?;
    let vm = PlayedHost { memory_mib: MEMORY_MIB, disk: Some(disk.build()?) }.boot(image, directory.path())?;
    let run = || -> Result<String> {
        let text = in_host(&vm)?;
        nothing_left(&vm)?;
        kernel_log::check(&vm)?;
        Ok(text)
    };
    run().with_context(|| vm.diagnosis())
}

fn in_host(vm: &Vm) -> Result<String> {
    vm.run(&format!("ip address add {GUEST}/24 dev $(cat /run/nic-virtio_net)"))?;
    gid_index(vm, DEVICE, GUEST)?;
    let index = gid_index(vm, DEVICE, IP)?;
    let command = format!(
        "{TOOLS}/guest-tests hca nested --device {DEVICE} --host {IP} --gid-index {index} --guest {GUEST} --image {TOOLS}/image"
    );
    let text = vm.spawn(&command)?.wait_success(LIMIT)?;
    Ok(text.lines().map(str::trim).collect::<Vec<_>>().join("; "))
}
