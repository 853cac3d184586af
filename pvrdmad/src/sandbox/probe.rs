//! Tries system calls in a thread of each kind (feature `testing`), to prove that the sandbox is in force.
#![expect(unsafe_code, reason = "system calls that no library makes")]

use std::ffi::CStr;
use std::io;

use libc::c_long;
use pvrdma_base::threads::{self, ThreadKind};
use serde::{Deserialize, Serialize};

use super::profile::Profile;
use super::report::SandboxReport;
use super::{landlocked, privileges};

/// Address families below this number are tried; Linux has 46.
const FAMILIES: i32 = 48;

/// Result of one attempt.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attempt {
    /// Name of the attempt.
    pub what: String,
    /// The error, or `None` if the attempt was permitted.
    pub errno: Option<i32>,
}

/// Attempts of a thread.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attempts {
    /// Kind of the thread.
    pub kind: String,
    /// Its attempts, in order.
    pub attempts: Vec<Attempt>,
}

/// Tries everything in a new thread of each kind, and in the calling thread, which must be the first of the process.
///
/// # Errors
/// No further thread can be started.
pub fn all(control: &CStr) -> io::Result<Vec<Attempts>> {
    let mut found = vec![Attempts { kind: ThreadKind::Main.name().to_owned(), attempts: attempts(control) }];
    for kind in ThreadKind::ALL.into_iter().filter(|kind| !matches!(kind, ThreadKind::Main | ThreadKind::Launcher)) {
        let control = control.to_owned();
        let thread = threads::spawn(kind, format!("probe {kind}"), move || attempts(&control))?;
        let attempts = thread.join().map_err(|_| io::Error::other("a probe panicked"))?;
        found.push(Attempts { kind: kind.name().to_owned(), attempts });
    }
    Ok(found)
}

/// Confines the process by Landlock alone.
#[must_use]
pub fn only_landlock(profile: Profile) -> SandboxReport {
    let mut report = SandboxReport::default();
    privileges::drop_all(true, &mut report);
    landlocked::restrict(profile, &mut report);
    report
}

/// Opens files that libibverbs needs, and others.
#[must_use]
pub fn reads() -> Vec<Attempt> {
    let files = [
        c"/sys/class/net",
        c"/sys/devices",
        c"/usr/lib",
        c"/etc/hostname",
        c"/sys/kernel",
        c"/proc/self/maps",
        c"/dev/null",
    ];
    let open = |path: &CStr| {
        let flags = c_long::from(libc::O_RDONLY | libc::O_CLOEXEC);
        let result = call(libc::SYS_openat, [libc::AT_FDCWD.into(), text(path), flags, 0, 0, 0]);
        close(&result);
        attempt(path.to_string_lossy(), result)
    };
    files.map(open).into()
}

/// Tries everything in the calling thread. Permitted actions are undone as far as possible.
#[must_use]
pub fn attempts(control: &CStr) -> Vec<Attempt> {
    let mut found = programs_and_processes();
    found.extend(files(control));
    found.extend(memory());
    found.extend((0..FAMILIES).map(|family| {
        let result = call(libc::SYS_socket, [family.into(), libc::SOCK_DGRAM.into(), 0, 0, 0, 0]);
        close(&result);
        attempt(format!("socket of family {family}"), result)
    }));
    found
}

/// Returns a pointer as an argument.
fn pointer<T>(value: &T) -> c_long {
    std::ptr::from_ref(value).expose_provenance().cast_signed() as c_long
}

fn text(value: &CStr) -> c_long {
    value.as_ptr().expose_provenance().cast_signed() as c_long
}

fn programs_and_processes() -> Vec<Attempt> {
    let (init, none) = (1, c"/nonexistent");
    // The program does not exist, so the attempt does not replace the process where it is permitted.
    let mut found = vec![
        attempt("execve", call(libc::SYS_execve, [text(none), 0, 0, 0, 0, 0])),
        attempt("execveat", call(libc::SYS_execveat, [libc::AT_FDCWD.into(), text(none), 0, 0, 0, 0])),
        // The flags are invalid, so the attempt does not start a process where it is permitted.
        attempt("clone", call(libc::SYS_clone, [libc::CLONE_SIGHAND.into(), 0, 0, 0, 0, 0])),
        attempt("unshare", call(libc::SYS_unshare, [0; 6])),
        // The process is not traced, so the attempt does not stop it where it is permitted.
        attempt("ptrace", call(libc::SYS_ptrace, [libc::PTRACE_PEEKDATA.into(), init, 0, 0, 0, 0])),
        attempt("kill", call(libc::SYS_kill, [init, 0, 0, 0, 0, 0])),
        attempt("tgkill", call(libc::SYS_tgkill, [init, init, 0, 0, 0, 0])),
        attempt("process_vm_readv", call(libc::SYS_process_vm_readv, [init, 0, 0, 0, 0, 0])),
        attempt("setuid", call(libc::SYS_setuid, [-1; 6])),
        attempt("capset", call(libc::SYS_capset, [0; 6])),
        attempt("setrlimit", {
            let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
            call(libc::SYS_prlimit64, [0, libc::RLIMIT_NOFILE.into(), pointer(&limit), 0, 0, 0])
        }),
    ];
    for (what, option, value) in [
        ("prctl(PR_SET_DUMPABLE)", libc::PR_SET_DUMPABLE, 1),
        ("prctl(PR_SET_NAME)", libc::PR_SET_NAME, text(c"renamed")),
    ] {
        found.push(attempt(what, call(libc::SYS_prctl, [option.into(), value, 0, 0, 0, 0])));
    }
    for (what, number) in [
        ("bpf", libc::SYS_bpf),
        ("io_uring_setup", libc::SYS_io_uring_setup),
        ("keyctl", libc::SYS_keyctl),
        ("landlock_restrict_self", libc::SYS_landlock_restrict_self),
        ("mount", libc::SYS_mount),
        ("perf_event_open", libc::SYS_perf_event_open),
        ("pidfd_open", libc::SYS_pidfd_open),
        ("seccomp", libc::SYS_seccomp),
        ("setns", libc::SYS_setns),
        ("userfaultfd", libc::SYS_userfaultfd),
    ] {
        found.push(attempt(what, call(number, [-1; 6])));
    }
    found
}

fn files(control: &CStr) -> Vec<Attempt> {
    let here = c_long::from(libc::AT_FDCWD);
    let mut found = Vec::new();
    for (what, path, flags) in [
        ("open to read", c"/etc/hostname", libc::O_RDONLY),
        ("open of a folder", c"/", libc::O_RDONLY | libc::O_DIRECTORY),
        ("open to create", c"/tmp/pvrdmad-probe", libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL),
        ("open of a device", c"/dev/null", libc::O_RDWR),
    ] {
        let result = call(libc::SYS_openat, [here, text(path), flags.into(), 0o600, 0, 0]);
        close(&result);
        found.push(attempt(what, result));
    }
    // musl opens files with this call.
    #[cfg(target_arch = "x86_64")]
    {
        let result = call(libc::SYS_open, [text(c"/etc/hostname"), libc::O_RDONLY.into(), 0, 0, 0, 0]);
        close(&result);
        found.push(attempt("open by the old call", result));
    }
    let (name, new) = (c"/tmp/pvrdmad-probe", c"/tmp/pvrdmad-probe-new");
    found.push(attempt("rename", call(libc::SYS_renameat2, [here, text(name), here, text(new), 0, 0])));
    found.push(attempt("unlink", call(libc::SYS_unlinkat, [here, text(new), 0, 0, 0, 0])));
    found.push(attempt("openat2", call(libc::SYS_openat2, [here, text(name), 0, 0, 0, 0])));
    found.push(attempt("chmod", call(libc::SYS_fchmodat, [here, text(name), 0o600, 0, 0, 0])));
    found.push(attempt("mkdir", call(libc::SYS_mkdirat, [here, text(c"/nonexistent/folder"), 0o700, 0, 0, 0])));
    found.extend(sockets(control));
    let mut pair = [0_i32; 2];
    let ends = std::ptr::from_mut(&mut pair).expose_provenance().cast_signed() as c_long;
    let result = call(libc::SYS_socketpair, [libc::AF_UNIX.into(), libc::SOCK_STREAM.into(), 0, ends, 0, 0]);
    if result.is_ok() {
        pair.iter().for_each(|end| close(&Ok((*end).into())));
    }
    found.push(attempt("socketpair", result));
    let result = call(libc::SYS_memfd_create, [text(c"probe"), 0, 0, 0, 0, 0]);
    close(&result);
    found.push(attempt("memfd_create", result));
    found
}

/// Uses standard input, which is not a socket: a filter decides before the kernel looks at the descriptor.
fn sockets(control: &CStr) -> Vec<Attempt> {
    const TIOCSTI: c_long = 0x5412;
    let mut address = libc::sockaddr_un { sun_family: 1, sun_path: [0; 108] };
    for (to, from) in address.sun_path.iter_mut().zip(control.to_bytes()) {
        *to = from.cast_signed();
    }
    let length = size_of_val(&address) as c_long;
    let filter = [0, libc::SOL_SOCKET.into(), libc::SO_ATTACH_FILTER.into(), 0, 0, 0];
    vec![
        attempt("connect", call(libc::SYS_connect, [0, pointer(&address), length, 0, 0, 0])),
        attempt("bind", call(libc::SYS_bind, [0, pointer(&address), length, 0, 0, 0])),
        attempt("listen", call(libc::SYS_listen, [0, 1, 0, 0, 0, 0])),
        attempt("sendto an address", call(libc::SYS_sendto, [0, 0, 0, 0, pointer(&address), length])),
        attempt("sendmsg", call(libc::SYS_sendmsg, [0; 6])),
        attempt("setsockopt(SO_ATTACH_FILTER)", call(libc::SYS_setsockopt, filter)),
        // Would inject input into the terminal that log lines go to.
        attempt("ioctl", call(libc::SYS_ioctl, [0, TIOCSTI, 0, 0, 0, 0])),
    ]
}

fn memory() -> Vec<Attempt> {
    const PAGE: c_long = 4096;
    let flags = c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let (write, run) = (c_long::from(libc::PROT_WRITE), c_long::from(libc::PROT_EXEC));
    let unmap = |mapped: &io::Result<c_long>| {
        if let Ok(address) = mapped {
            let _ = call(libc::SYS_munmap, [*address, PAGE, 0, 0, 0, 0]);
        }
    };
    let mapped = call(libc::SYS_mmap, [0, PAGE, write | run, flags, -1, 0]);
    unmap(&mapped);
    let plain = call(libc::SYS_mmap, [0, PAGE, write, flags, -1, 0]);
    let changed = plain.as_ref().map_or(Ok(0), |page| call(libc::SYS_mprotect, [*page, PAGE, run, 0, 0, 0]));
    unmap(&plain);
    vec![attempt("mmap to run", mapped), attempt("mprotect to run", changed)]
}

fn attempt(what: impl Into<String>, result: io::Result<c_long>) -> Attempt {
    Attempt { what: what.into(), errno: result.err().and_then(|error| error.raw_os_error()) }
}

/// Closes a descriptor that an attempt returned.
fn close(result: &io::Result<c_long>) {
    if let Ok(descriptor) = result {
        let _ = call(libc::SYS_close, [*descriptor, 0, 0, 0, 0, 0]);
    }
}

fn call(number: c_long, arguments: [c_long; 6]) -> io::Result<c_long> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: of the calls of this file, those that read or write memory get the address of a value that lives on, and
    // those that change the address space get pages that the call before it made, which no other code uses.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
