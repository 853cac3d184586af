//! The device as the guest sees it.

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::kernel_log;
use crate::pair::{Link, Pair};

/// Port state, limits, and the messages of the driver.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("device/port-active", port_active),
        Case::new("device/limits", limits),
        Case::new("device/no-driver-warning", no_driver_warning).ignore_kernel_log(),
    ]
}

fn port_active(pair: &mut Pair, link: &Link) -> Result<String> {
    for vm in pair.vms() {
        let output = vm.run(&format!("rdma link show {}/1", link.device))?;
        if !output.contains("state ACTIVE") || !output.contains("physical_state LINK_UP") {
            bail!("{}: {output}", vm.name());
        }
    }
    Ok("ACTIVE, LINK_UP".to_owned())
}

/// Minimum limits of the device.
const LIMITS: [(&str, u64); 6] = [
    ("max_qp:", 16384),
    ("max_mr:", 65536),
    ("max_cq:", 16384),
    ("max_mr_size:", 1 << 30),
    ("max_sge:", 16),
    ("max_srq:", 1),
];

fn limits(pair: &mut Pair, link: &Link) -> Result<String> {
    let output = pair.a().run(&format!("ibv_devinfo -v -d {}", link.device))?;
    let mut wrong = Vec::new();
    for (name, least) in LIMITS {
        match value(&output, name) {
            Some(text) if number(text)? >= least => {}
            found => wrong.push(format!("{name} is {found:?}, wanted at least {least}")),
        }
    }
    for word in ["MEM_MGT_EXTENSIONS", "PORT_ACTIVE", "ATOMIC_"] {
        if !output.contains(word) {
            wrong.push(format!("{word} is missing"));
        }
    }
    if output.contains("ATOMIC_NONE") {
        wrong.push("no atomics".to_owned());
    }
    if !wrong.is_empty() {
        bail!("{}\n{output}", wrong.join("\n"));
    }
    Ok(String::new())
}

fn value<'a>(output: &'a str, name: &str) -> Option<&'a str> {
    output.lines().find_map(|line| line.trim().strip_prefix(name)).map(str::trim)
}

fn number(text: &str) -> Result<u64> {
    let word = text.split_whitespace().next().unwrap_or_default();
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    }
    .with_context(|| format!("{text} is no number"))
}

/// Checks that loading the module causes no warning. The log of the first boot was already checked, so this checks a
/// reload.
fn no_driver_warning(pair: &mut Pair, _link: &Link) -> Result<String> {
    kernel_log::take_warnings(pair.a())?;
    pair.a().run("rmmod vmw_pvrdma")?;
    pair.load_pvrdma(0)?;
    let warnings = kernel_log::take_warnings(pair.a())?;
    if !warnings.is_empty() {
        bail!("{}", warnings.join("\n"));
    }
    Ok(String::new())
}
