//! Messages of a guest's kernel during a test.

use anyhow::{Result, bail};

use crate::vm::Vm;

/// Empties the kernel log and returns the lines that report a problem.
pub(crate) fn take_warnings(vm: &Vm) -> Result<Vec<String>> {
    let text = vm.run("dmesg --read-clear --decode")?;
    Ok(text.lines().filter(|line| is_warning(line)).map(str::to_owned).collect())
}

/// Returns an error if there are such lines.
pub(crate) fn check(vm: &Vm) -> Result<()> {
    let warnings = take_warnings(vm)?;
    if !warnings.is_empty() {
        bail!("{}: kernel warnings:\n{}", vm.name(), warnings.join("\n"));
    }
    Ok(())
}

/// Returns `true` if a decoded line reports a fault of the kernel itself.
pub(crate) fn is_fault(line: &str) -> bool {
    const ALWAYS: [&str; 8] = [
        "WARNING:",
        "BUG:",
        "Oops",
        "Call Trace",
        "general protection",
        "blocked for more than",
        "Kernel panic",
        "refcount_t",
    ];
    ALWAYS.iter().any(|word| line.contains(word))
}

/// Returns `true` if a decoded line is a warning of one of the drivers, or of the kernel itself.
fn is_warning(line: &str) -> bool {
    const LEVELS: [&str; 5] = [":warn", ":err", ":crit", ":alert", ":emerg"];
    let level = line.get(..20).unwrap_or(line);
    let serious = LEVELS.iter().any(|word| level.contains(word));
    // Loading an out-of-tree module is reported at warning level.
    let taint = line.contains("taint") || line.contains("module verification");
    is_fault(line) || (serious && !taint && (line.contains("pvrdma") || line.contains("vmxnet3")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_warnings_count_and_taint_does_not() {
        assert!(is_warning("kern  :warn  : [    9.1] vmw_pvrdma 0000:00:10.1: failed to do it"));
        assert!(is_warning("kern  :err   : [    9.1] vmxnet3 0000:00:10.0 eth0: tq[0] error 0x80000000"));
        assert!(is_warning("kern  :warn  : [    9.1] WARNING: CPU: 0 PID: 1 at kernel/x.c"));
        assert!(!is_warning("kern  :info  : [    9.1] vmw_pvrdma 0000:00:10.1: device version 20"));
        assert!(!is_warning("kern  :warn  : [    9.1] vmw_pvrdma: loading out-of-tree module taints kernel."));
        assert!(!is_warning("kern  :err   : [    9.1] virtio: whatever"));
    }
}
