//! Denies access to files, TCP ports, abstract sockets and other processes with Landlock.

use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd, RestrictionStatus, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, Scope,
};

use super::profile::Profile;
use super::report::SandboxReport;

/// Newest ABI that this file was written for.
const NEWEST: ABI = ABI::V9;

/// Files that libibverbs and the provider libraries read: the libraries themselves, and the list of adapters with their
/// attributes.
const READ: &[&str] = &[
    "/etc/ld.so.cache",
    "/etc/libibverbs.d",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/sys/class/infiniband",
    "/sys/class/infiniband_mad",
    "/sys/class/infiniband_verbs",
    "/sys/class/net",
    // Target of the links in these directories.
    "/sys/devices",
];

/// Device nodes of the adapters.
const DEVICES: &str = "/dev/infiniband";

/// Accesses that a kernel restricts only from this ABI version on.
const SINCE: &[(u32, &str)] = &[
    (2, "moving files between folders"),
    (3, "truncating files"),
    (4, "TCP ports"),
    (5, "requests to device nodes"),
    (6, "abstract unix sockets and signals to other processes"),
];

/// Restricts the calling thread and the threads that it starts.
pub(super) fn restrict(profile: Profile, report: &mut SandboxReport) {
    match apply(profile) {
        Ok(status) => {
            report.landlock_abi = match status.landlock {
                LandlockStatus::Available { effective_abi, .. } => number(effective_abi),
                _ => 0,
            };
            match status.landlock {
                LandlockStatus::NotEnabled => report.missing.push("Landlock is not enabled in the kernel".to_owned()),
                LandlockStatus::NotImplemented => report.missing.push("the kernel has no Landlock".to_owned()),
                _ => {}
            }
            let abi = report.landlock_abi;
            let lacking = SINCE.iter().filter(|(since, _)| (1..*since).contains(&abi));
            report
                .missing
                .extend(lacking.map(|(since, what)| format!("Landlock before ABI {since} has no rule for {what}")));
        }
        Err(error) => report.missing.push(format!("Landlock: {error}")),
    }
}

fn number(abi: ABI) -> u32 {
    u32::try_from(abi as i32).unwrap_or(0)
}

/// Applies all restrictions that the kernel supports.
fn apply(profile: Profile) -> Result<RestrictionStatus, RulesetError> {
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    match profile {
        Profile::Rxe | Profile::RxeAddressed => ruleset.restrict_self(),
        Profile::Ibverbs => {
            let read: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::ReadDir;
            let device = read | AccessFs::WriteFile | AccessFs::IoctlDev;
            let wanted = READ.iter().map(|path| (*path, read)).chain([(DEVICES, device)]);
            // A path that does not exist needs no rule.
            let rules = wanted.filter_map(|(path, access)| {
                let folder = Path::new(path).is_dir();
                let access = if folder { access } else { access & AccessFs::from_file(NEWEST) };
                PathFd::new(path).ok().map(|file| Ok::<_, RulesetError>(PathBeneath::new(file, access)))
            });
            ruleset.add_rules(rules)?.restrict_self()
        }
    }
}
