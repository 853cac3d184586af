//! The sandbox, in separate processes: attempts that it must refuse, and its state as the kernel shows it.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};

use pvrdma_base::threads::ThreadKind;
use pvrdma_verbs::testing::skipped;
use pvrdmad::sandbox::{
    SandboxReport,
    probe::{Attempt, Attempts},
};
use serde::de::DeserializeOwned;
use tempfile::TempDir;

const EPERM: i32 = 1;
const EACCES: i32 = 13;
const ENOTSOCK: i32 = 88;

const PROBE: &str = env!("CARGO_BIN_EXE_sandbox-probe");

fn probe(what: &str, profile: &str, mode: &str) -> Command {
    let mut command = Command::new(PROBE);
    command.args([what, profile, mode]).stdin(Stdio::null());
    command
}

/// A copy of the probe that every user can execute, because the build folder may be inside root's home.
struct Shared(TempDir);

impl Shared {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        // Another process copies it: a child that another test has just forked holds the descriptors of this one, and a
        // program that is open for writing cannot be executed (`ETXTBSY`).
        let copied = Command::new("install").arg("--mode=755").arg(PROBE).arg(folder.path()).status().unwrap();
        assert!(copied.success(), "{copied}");
        Self(folder)
    }

    /// Returns the probe as a command of an unprivileged user.
    fn probe(&self, what: &str, profile: &str, mode: &str) -> Command {
        let mut command = Command::new(self.0.path().join("sandbox-probe"));
        command.args([what, profile, mode]).uid(NOBODY).gid(NOBODY);
        command
    }
}

/// Runs the probe. Returns its sandbox report and its output.
fn ask<T: DeserializeOwned>(what: &str, profile: &str, mode: &str) -> (Option<SandboxReport>, T) {
    let output = probe(what, profile, mode).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{:?}: {text} {}", output.status, String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).unwrap()
}

fn errno(attempts: &[Attempt], what: &str) -> Option<i32> {
    let attempt = attempts.iter().find(|attempt| attempt.what == what);
    attempt.unwrap_or_else(|| unreachable!("no attempt '{what}'")).errno
}

/// Checks the attempts themselves: without a sandbox they succeed, or fail only because of their arguments.
#[test]
fn without_a_sandbox_the_attempts_reach_the_kernel() {
    let (report, all) = ask::<Vec<Attempts>>("attempts", "rxe", "off");
    assert_eq!(report, None);
    for Attempts { kind, attempts } in all {
        for (what, expected) in [
            ("execve", Some(2)),
            ("clone", Some(22)),
            ("ptrace", Some(3)),
            ("kill", None),
            ("open to read", None),
            ("open to create", None),
            ("unlink", None),
            ("connect", Some(ENOTSOCK)),
            ("sendto an address", Some(ENOTSOCK)),
            ("sendmsg", Some(ENOTSOCK)),
            ("setsockopt(SO_ATTACH_FILTER)", Some(ENOTSOCK)),
            ("memfd_create", None),
            ("mmap to run", None),
            ("mprotect to run", None),
            ("prctl(PR_SET_DUMPABLE)", None),
            ("socketpair", None),
            ("socket of family 1", None),
            ("socket of family 2", None),
        ] {
            assert_eq!(errno(&attempts, what), expected, "{kind}: {what}");
        }
    }
}

#[test]
fn every_attempt_of_every_kind_of_thread_is_refused() {
    let (report, all) = ask::<Vec<Attempts>>("attempts", "rxe", "on");
    assert_eq!(report.unwrap().missing, [""; 0]);
    let kinds: Vec<_> = all.iter().map(|attempts| attempts.kind.as_str()).collect();
    let expected = ThreadKind::ALL.into_iter().filter(|kind| *kind != ThreadKind::Launcher).map(ThreadKind::name);
    assert_eq!(kinds, expected.collect::<Vec<_>>());
    for Attempts { kind, attempts } in all {
        assert!(attempts.len() > 80);
        // These threads may send messages: descriptors to keepers and to the next worker, and the file of doorbell
        // pages to clients. In this profile no socket has an address.
        let sends = matches!(kind.as_str(), "main" | "accept" | "connection");
        for Attempt { what, errno } in attempts {
            let expected = match what.as_str() {
                // Libraries look for files, so this fails with an error in all modes instead of killing the process.
                what if what.starts_with("open ") => EACCES,
                "sendmsg" if sends => ENOTSOCK,
                _ => EPERM,
            };
            assert_eq!(errno, Some(expected), "{kind}: {what}");
        }
    }
}

/// Links whose frames have addresses need `sendmsg`; only the threads that send such frames may call it.
#[test]
fn messages_to_addresses_are_sent_where_a_link_has_them() {
    let (_, all) = ask::<Vec<Attempts>>("attempts", "rxe-addressed", "on");
    for Attempts { kind, attempts } in all {
        let sends = !matches!(kind.as_str(), "supervisor" | "doorbell-pages" | "pin" | "interrupts" | "capture");
        for Attempt { what, errno } in attempts.into_iter().filter(|attempt| !attempt.what.starts_with("open ")) {
            let expected = if sends && what == "sendmsg" { ENOTSOCK } else { EPERM };
            assert_eq!(errno, Some(expected), "{kind}: {what}");
        }
    }
}

/// With the host's adapter, a thread may open the files that libibverbs opens, and create the sockets with which it
/// finds neighbours.
#[test]
fn with_the_hosts_adapter_only_the_calls_of_libibverbs_are_allowed() {
    let (report, all) = ask::<Vec<Attempts>>("attempts", "ibverbs", "on");
    assert_eq!(report.unwrap().missing, [""; 0]);
    const NETLINK_AND_UDP: [&str; 3] = ["socket of family 2", "socket of family 10", "socket of family 16"];
    for Attempts { kind, attempts } in all {
        for Attempt { what, errno } in attempts {
            let allowed = match what.as_str() {
                what if NETLINK_AND_UDP.contains(&what) => {
                    !matches!(kind.as_str(), "supervisor" | "doorbell-pages" | "pin" | "interrupts" | "capture")
                }
                // Fails because the descriptor is not a socket.
                "connect" | "bind" | "sendmsg" | "setsockopt(SO_ATTACH_FILTER)" => errno == Some(ENOTSOCK),
                _ => false,
            };
            match errno {
                None => assert!(allowed, "{kind}: {what}"),
                Some(EPERM | EACCES) => {}
                Some(errno) => assert!(allowed, "{kind}: {what}: {errno}"),
            }
        }
    }
    let (_, reads) = ask::<Vec<Attempt>>("files", "ibverbs", "on");
    for (what, expected) in [
        ("/sys/class/net", None),
        ("/sys/devices", None),
        ("/usr/lib", None),
        ("/etc/hostname", Some(EACCES)),
        ("/sys/kernel", Some(EACCES)),
        ("/proc/self/maps", Some(EACCES)),
        ("/dev/null", Some(EACCES)),
    ] {
        assert_eq!(errno(&reads, what), expected, "{what}");
    }
}

/// Each layer holds alone: this is the protection on a kernel without seccomp filters.
#[test]
fn landlock_alone_closes_files_ports_abstract_sockets_and_signals() {
    let (report, all) = ask::<Vec<Attempts>>("attempts", "rxe", "landlock");
    let abi = report.unwrap().landlock_abi;
    if abi == 0 {
        skipped("the kernel has no Landlock");
        return;
    }
    for Attempts { kind, attempts } in all {
        for what in ["open to read", "open of a folder", "open to create", "open of a device"] {
            assert_eq!(errno(&attempts, what), Some(EACCES), "{kind}: {what}");
        }
        // Landlock prevents tracing of processes outside, and signals to them from ABI 6 on.
        let signal = if abi >= 6 { Some(EPERM) } else { None };
        assert_eq!(errno(&attempts, "kill"), signal, "{kind}");
    }
    let (_, reads) = ask::<Vec<Attempt>>("files", "rxe", "landlock");
    assert!(reads.iter().all(|attempt| attempt.errno == Some(EACCES)), "{reads:?}");
}

#[test]
fn a_strict_filter_kills_the_process() {
    let output = probe("overstep", "rxe", "strict").output().unwrap();
    assert_eq!(output.status.signal(), Some(31), "{output:?}");
    // In the default mode the call only fails.
    let output = probe("overstep", "rxe", "on").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// A backtrace opens files. This must not kill a process that survives the panic.
#[test]
fn a_panic_with_its_trace_survives_the_strictest_filter() {
    for profile in ["rxe", "ibverbs"] {
        let output = probe("panic", profile, "strict").env("RUST_BACKTRACE", "full").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(errors.contains("a bug") && errors.contains("stack backtrace"), "{errors}");
    }
}

/// The process aborts itself; the filter does not kill it for the attempt.
#[test]
fn a_panic_that_may_have_torn_state_aborts_under_the_strictest_filter() {
    let output = probe("torn", "rxe", "strict").output().unwrap();
    assert_eq!(output.status.signal(), Some(rustix::process::Signal::ABORT.as_raw()), "{output:?}");
}

/// A process that runs until its standard input ends.
struct Held {
    child: Child,
    report: SandboxReport,
}

impl Held {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let (report, ()): (Option<SandboxReport>, ()) = serde_json::from_str(&line).unwrap();
        Self { child, report: report.unwrap_or_default() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}

/// A field of a thread's `/proc/…/status`.
fn field<'a>(status: &'a str, name: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim()
}

/// Fails unless every thread of the process is confined and has these capabilities.
#[track_caller]
fn assert_confined(held: &Held, capabilities: u64, bounding_set: bool) {
    let expected = format!("{capabilities:016x}");
    let mut names = Vec::new();
    for task in fs::read_dir(format!("/proc/{}/task", held.child.id())).unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let name = field(&status, "Name:");
        assert_eq!(field(&status, "Seccomp:"), "2", "{name}");
        assert_eq!(field(&status, "NoNewPrivs:"), "1", "{name}");
        assert_eq!((field(&status, "CapInh:"), field(&status, "CapAmb:")), (NONE, NONE), "{name}");
        assert_eq!((field(&status, "CapPrm:"), field(&status, "CapEff:")), (&*expected, &*expected), "{name}");
        if bounding_set {
            assert_eq!(field(&status, "CapBnd:"), expected, "{name}");
        }
        names.push(name.to_owned());
    }
    names.sort();
    // The kernel keeps 15 bytes of a name.
    let mut all: Vec<_> = ThreadKind::ALL.into_iter().map(|kind| format!("{kind:.15}")).collect();
    all.retain(|name| name != "main");
    all.push("sandbox-probe".to_owned());
    all.sort();
    assert_eq!(names, all);
}

const NONE: &str = "0000000000000000";
const NOBODY: u32 = 65534;
const CAP_IPC_LOCK: u64 = 1 << 14;
const CAP_SYS_RESOURCE: u64 = 1 << 24;

#[test]
fn the_kernel_shows_every_thread_confined() {
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let own = u64::from_str_radix(field(&own, "CapEff:"), 16).unwrap();
    let held = Held::start(&mut probe("hold", "rxe", "on"));
    // The capability that is kept for locking memory where the limit cannot be raised.
    let kept = if own & CAP_SYS_RESOURCE == 0 { own & CAP_IPC_LOCK } else { 0 };
    assert_confined(&held, kept, own != 0);
    let SandboxReport { no_new_privs, undumpable, capabilities, landlock_abi: _, seccomp, missing } = &held.report;
    assert_eq!((no_new_privs, undumpable, seccomp), (&true, &true, &true));
    assert_eq!(capabilities.as_slice(), if kept == 0 { &[][..] } else { &["CAP_IPC_LOCK"][..] });
    assert_eq!(missing, &[""; 0]);
}

#[test]
fn a_user_without_capabilities_has_none_in_the_sandbox() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("needs root, to become another user");
        return;
    }
    let held = Held::start(&mut Shared::new().probe("hold", "ibverbs", "on"));
    assert_confined(&held, 0, false);
    assert_eq!((held.report.capabilities.as_slice(), held.report.missing.as_slice()), (&[][..], &[][..]));
}

/// C12 of the security review: a compromised VMM that runs as the same user cannot read the daemon's memory.
#[test]
fn a_process_of_the_same_user_cannot_read_its_memory() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("needs root, to become another user");
        return;
    }
    let shared = Shared::new();
    let opens = |mode| {
        let held = Held::start(&mut shared.probe("hold", "rxe", mode));
        let memory = format!("/proc/{}/mem", held.child.id());
        Command::new("dd").args([&format!("if={memory}"), "count=0"]).uid(NOBODY).gid(NOBODY).output().unwrap().status
    };
    assert!(opens("off").success(), "the attack must succeed without the sandbox");
    assert!(!opens("on").success());
}
