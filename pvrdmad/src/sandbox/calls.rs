// Long: one table, which is read as a whole.
//! System calls permitted for each kind of thread: the single table behind the filters and their documentation.
//!
//! A thread has the groups of its kind. Some calls are permitted only with certain arguments; the kernel compares
//! numbers and does not follow pointers.

use libc::c_long;
use pvrdma_base::threads::ThreadKind;

use super::profile::Profile;

/// A group of system calls.
#[derive(Debug)]
pub(super) struct Group {
    /// Name, one or two words.
    pub(super) name: &'static str,
    /// Purpose of the calls.
    pub(super) purpose: &'static str,
    /// The calls.
    pub(super) calls: &'static [Call],
}

impl Group {
    /// Returns `true` if libraries may look for files with these calls.
    pub(super) fn looks(&self) -> bool {
        self.name == LOOK.name
    }

    /// Returns `true` if these calls start threads.
    pub(super) fn starts_threads(&self) -> bool {
        self.name == START.name
    }
}

/// A system call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) name: &'static str,
    pub(super) number: c_long,
    pub(super) allowed: Allowed,
}

/// Arguments with which a call is permitted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Allowed {
    /// Any arguments.
    Always,
    /// All conditions of at least one list hold. The text describes them.
    When(&'static [&'static [Condition]], &'static str),
}

/// A condition on an argument.
#[derive(Clone, Copy, Debug)]
pub(super) enum Condition {
    /// These bits of the argument have this value.
    Bits { argument: u8, mask: u32, value: u32 },
    /// The low 32 bits of the argument have this value.
    Is { argument: u8, value: u32 },
    /// The argument is a null pointer.
    Null { argument: u8 },
    /// The argument is the ID of this process.
    OwnProcess { argument: u8 },
}

use Condition::{Bits, Is, Null, OwnProcess};

const fn call(name: &'static str, number: c_long) -> Call {
    Call { name, number, allowed: Allowed::Always }
}

const fn when(name: &'static str, number: c_long, lists: &'static [&'static [Condition]], words: &'static str) -> Call {
    Call { name, number, allowed: Allowed::When(lists, words) }
}

/// A constant of the C library as a bit pattern.
#[expect(clippy::cast_sign_loss, reason = "the kernel compares bits")]
const fn bits(constant: i32) -> u32 {
    constant as u32
}

const fn is(argument: u8, value: i32) -> Condition {
    Is { argument, value: bits(value) }
}

const fn without(argument: u8, flags: i32) -> Condition {
    Bits { argument, mask: bits(flags), value: 0 }
}

const fn with(argument: u8, flags: i32) -> Condition {
    Bits { argument, mask: bits(flags), value: bits(flags) }
}

/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of Linux 6.13, with which recent C libraries protect stacks.
const GUARD_ADVICE: [i32; 2] = [102, 103];

/// Flags with which the C library clones a thread (`pthread_create`).
const THREAD: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// Flag that musl adds, and the kernel has ignored since 2.6.
const DETACHED: i32 = libc::CLONE_DETACHED;

/// Without an address, a datagram can only go to the socket's peer. With one, it could go to any socket.
const SEND: Call = when("sendto", libc::SYS_sendto, &[&[Null { argument: 4 }]], "to the peer of a connected socket");

static RUNTIME: Group = Group {
    name: "runtime",
    purpose: "memory, locks, time, open descriptors, log lines, the end",
    calls: &[
        call("brk", libc::SYS_brk),
        call("clock_gettime", libc::SYS_clock_gettime),
        call("clock_nanosleep", libc::SYS_clock_nanosleep),
        call("close", libc::SYS_close),
        call("exit", libc::SYS_exit),
        call("exit_group", libc::SYS_exit_group),
        when(
            "fcntl",
            libc::SYS_fcntl,
            &[
                &[is(1, libc::F_GETFD)],
                &[is(1, libc::F_GETFL)],
                &[is(1, libc::F_DUPFD_CLOEXEC)],
                // musl calls this after the call above, for kernels that ignore the flag when they duplicate.
                &[is(1, libc::F_SETFD), is(2, libc::FD_CLOEXEC)],
            ],
            "F_GETFD, F_GETFL, F_DUPFD_CLOEXEC, F_SETFD with FD_CLOEXEC",
        ),
        call("futex", libc::SYS_futex),
        call("getpid", libc::SYS_getpid),
        call("getrandom", libc::SYS_getrandom),
        call("gettid", libc::SYS_gettid),
        when(
            "madvise",
            libc::SYS_madvise,
            &[
                &[is(2, libc::MADV_DONTNEED)],
                &[is(2, libc::MADV_FREE)],
                &[is(2, libc::MADV_POPULATE_READ)],
                &[is(2, libc::MADV_POPULATE_WRITE)],
                &[is(2, GUARD_ADVICE[0])],
                &[is(2, GUARD_ADVICE[1])],
            ],
            "MADV_DONTNEED, MADV_FREE, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE",
        ),
        when(
            "mmap",
            libc::SYS_mmap,
            &[&[without(2, libc::PROT_EXEC), with(3, libc::MAP_ANONYMOUS)]],
            "anonymous, not PROT_EXEC",
        ),
        when("mprotect", libc::SYS_mprotect, &[&[without(2, libc::PROT_EXEC)]], "not PROT_EXEC"),
        call("mremap", libc::SYS_mremap),
        call("munmap", libc::SYS_munmap),
        call("nanosleep", libc::SYS_nanosleep),
        call("ppoll", libc::SYS_ppoll),
        when("prlimit64", libc::SYS_prlimit64, &[&[is(0, 0), Null { argument: 2 }]], "reading limits of its own"),
        call("read", libc::SYS_read),
        call("restart_syscall", libc::SYS_restart_syscall),
        when(
            "rt_sigaction",
            libc::SYS_rt_sigaction,
            &[&[is(0, libc::SIGABRT)], &[is(0, libc::SIGBUS)], &[is(0, libc::SIGSEGV)]],
            "SIGABRT, SIGBUS, SIGSEGV",
        ),
        call("rt_sigprocmask", libc::SYS_rt_sigprocmask),
        call("rt_sigreturn", libc::SYS_rt_sigreturn),
        call("sched_getaffinity", libc::SYS_sched_getaffinity),
        call("sched_yield", libc::SYS_sched_yield),
        call("sigaltstack", libc::SYS_sigaltstack),
        when("tgkill", libc::SYS_tgkill, &[&[OwnProcess { argument: 0 }]], "threads of its own"),
        call("write", libc::SYS_write),
        call("writev", libc::SYS_writev),
        #[cfg(target_arch = "x86_64")]
        call("poll", libc::SYS_poll),
    ],
};

/// Finds the pages of a guest's memory that are present, before they are locked.
const FIND_DATA: Call = when(
    "lseek",
    libc::SYS_lseek,
    &[&[is(2, libc::SEEK_DATA)], &[is(2, libc::SEEK_HOLE)], &[is(2, libc::SEEK_END)]],
    "SEEK_DATA, SEEK_HOLE, SEEK_END",
);

static GUEST: Group = Group {
    name: "guest",
    purpose: "running requests of guests: locking memory, interrupts, sending frames, making eventfds and timers, counting lost frames of a link, identifying the process of a client",
    calls: &[
        call("eventfd2", libc::SYS_eventfd2),
        // Tells whether an access to guest memory slept.
        when("getrusage", libc::SYS_getrusage, &[&[is(0, libc::RUSAGE_THREAD)]], "RUSAGE_THREAD"),
        when(
            "getsockopt",
            libc::SYS_getsockopt,
            &[
                &[is(1, libc::SOL_SOCKET), is(2, libc::SO_ERROR)],
                &[is(1, libc::SOL_SOCKET), is(2, libc::SO_PEERCRED)],
                &[is(1, libc::SOL_PACKET), is(2, libc::PACKET_STATISTICS)],
                &[is(1, libc::SOL_UDP), is(2, libc::UDP_SEGMENT)],
            ],
            "SO_ERROR, SO_PEERCRED, PACKET_STATISTICS, UDP_SEGMENT",
        ),
        // An interrupt is raised through an asynchronous operation of the kernel, which never blocks; see
        // pvrdma_vfio_user_server::eventfd.
        call("io_getevents", libc::SYS_io_getevents),
        call("io_submit", libc::SYS_io_submit),
        FIND_DATA,
        call("mlock", libc::SYS_mlock),
        call("mlock2", libc::SYS_mlock2),
        call("munlock", libc::SYS_munlock),
        SEND,
        call("shutdown", libc::SYS_shutdown),
        call("timerfd_create", libc::SYS_timerfd_create),
        call("timerfd_settime", libc::SYS_timerfd_settime),
    ],
};

static CLIENT: Group = Group {
    name: "client",
    purpose: "a client's messages and descriptors, mapping its memory",
    calls: &[
        when("fcntl", libc::SYS_fcntl, &[&[is(1, libc::F_GET_SEALS)]], "F_GET_SEALS"),
        call("fstat", libc::SYS_fstat),
        call("fstatfs", libc::SYS_fstatfs),
        when("mmap", libc::SYS_mmap, &[&[without(2, libc::PROT_EXEC)]], "not PROT_EXEC"),
        call("recvmsg", libc::SYS_recvmsg),
    ],
};

static ACCEPT: Group = Group { name: "accept", purpose: "new clients", calls: &[call("accept4", libc::SYS_accept4)] };

static ASK: Group = Group {
    name: "ask",
    purpose: "requests to the supervisor for operations that the process cannot do, and waiting for its reply",
    calls: &[
        call("recvmsg", libc::SYS_recvmsg),
        SEND,
        when(
            "setsockopt",
            libc::SYS_setsockopt,
            &[&[is(1, libc::SOL_SOCKET), is(2, libc::SO_RCVTIMEO)]],
            "SO_RCVTIMEO",
        ),
    ],
};

static LINK: Group = Group {
    name: "link",
    purpose: "frames from and to a link, its connections",
    calls: &[
        call("accept4", libc::SYS_accept4),
        call("getsockname", libc::SYS_getsockname),
        when("ioctl", libc::SYS_ioctl, &[&[Is { argument: 1, value: FIONBIO }]], "FIONBIO"),
        call("recvfrom", libc::SYS_recvfrom),
        call("recvmmsg", libc::SYS_recvmmsg),
        call("recvmsg", libc::SYS_recvmsg),
        SEND,
        // No other option: with filters and memberships a socket could receive frames of other networks.
        when("setsockopt", libc::SYS_setsockopt, &[&[is(1, libc::SOL_SOCKET), is(2, libc::SO_SNDBUF)]], "SO_SNDBUF"),
        call("shutdown", libc::SYS_shutdown),
    ],
};

static ADDRESSED: Group = Group {
    name: "addressed",
    purpose: "frames to an address, many at a time: links by VXLAN and packet sockets",
    calls: &[
        call("sendmmsg", libc::SYS_sendmmsg),
        call("sendmsg", libc::SYS_sendmsg),
        when(
            "setsockopt",
            libc::SYS_setsockopt,
            &[&[is(1, libc::SOL_SOCKET), is(2, libc::SO_PRIORITY)]],
            "SO_PRIORITY",
        ),
    ],
};

static PIN: Group = Group {
    name: "pin",
    purpose: "locking memory",
    calls: &[
        FIND_DATA,
        call("mlock", libc::SYS_mlock),
        call("mlock2", libc::SYS_mlock2),
        call("munlock", libc::SYS_munlock),
    ],
};

static SIGNAL: Group = Group {
    name: "signal",
    purpose: "interrupts that can take long; without asynchronous operations a `write`",
    calls: &[call("io_getevents", libc::SYS_io_getevents), call("io_submit", libc::SYS_io_submit)],
};

static PACE: Group = Group {
    name: "pace",
    purpose: "short naps between two looks at rings",
    calls: &[when("prctl", libc::SYS_prctl, &[&[is(0, libc::PR_SET_TIMERSLACK)]], "PR_SET_TIMERSLACK")],
};

/// A filter cannot see if the message has an address. Where sockets may send to addresses, `addressed` permits this
/// call as well.
static LEND: Group = Group {
    name: "lend",
    purpose: "giving a keeper the socket of a client, a client the file of doorbell pages, and the next worker all of a network",
    calls: &[call("sendmsg", libc::SYS_sendmsg)],
};

pub(super) static GUARD: Group = Group {
    name: "guard",
    purpose: "a process of its own, which answers the kernel for doorbell pages of a process that has ended: taking them",
    calls: &[call("recvmsg", libc::SYS_recvmsg)],
};

/// All system calls of a keeper; it has no other group.
pub(super) static KEEPER: Group = Group {
    name: "keeper",
    purpose: "a process of its own for each device, which receives the descriptors of clients and holds them, and has no other group",
    calls: &[
        call("accept4", libc::SYS_accept4),
        call("brk", libc::SYS_brk),
        call("close", libc::SYS_close),
        call("exit", libc::SYS_exit),
        call("exit_group", libc::SYS_exit_group),
        when(
            "fcntl",
            libc::SYS_fcntl,
            &[&[is(1, libc::F_GET_SEALS)], &[is(1, libc::F_GETFL)], &[is(1, libc::F_GETFD)]],
            "F_GET_SEALS, F_GETFL, F_GETFD",
        ),
        call("fstat", libc::SYS_fstat),
        call("fstatfs", libc::SYS_fstatfs),
        when(
            "getsockopt",
            libc::SYS_getsockopt,
            &[&[is(1, libc::SOL_SOCKET), is(2, libc::SO_PEERCRED)]],
            "SO_PEERCRED",
        ),
        // The kernel's answer to an operation that would signal it distinguishes an eventfd from other descriptors; see
        // pvrdma_vfio_user_server::eventfd.
        call("io_getevents", libc::SYS_io_getevents),
        call("io_submit", libc::SYS_io_submit),
        // Used by the allocator.
        when("madvise", libc::SYS_madvise, &[&[is(2, libc::MADV_DONTNEED)]], "MADV_DONTNEED"),
        when(
            "mmap",
            libc::SYS_mmap,
            &[&[without(2, libc::PROT_EXEC), with(3, libc::MAP_ANONYMOUS)]],
            "anonymous, not PROT_EXEC",
        ),
        call("mremap", libc::SYS_mremap),
        call("munmap", libc::SYS_munmap),
        call("ppoll", libc::SYS_ppoll),
        call("recvmsg", libc::SYS_recvmsg),
        call("restart_syscall", libc::SYS_restart_syscall),
        call("rt_sigreturn", libc::SYS_rt_sigreturn),
        call("sendmsg", libc::SYS_sendmsg),
        call("sigaltstack", libc::SYS_sigaltstack),
        call("write", libc::SYS_write),
        #[cfg(target_arch = "x86_64")]
        call("poll", libc::SYS_poll),
    ],
};

static CAPTURE: Group = Group {
    name: "capture",
    purpose: "writing to the client of a capture",
    calls: &[
        SEND,
        when(
            "setsockopt",
            libc::SYS_setsockopt,
            &[&[is(1, libc::SOL_SOCKET), is(2, libc::SO_SNDTIMEO)]],
            "SO_SNDTIMEO",
        ),
        call("shutdown", libc::SYS_shutdown),
    ],
};

static PROTOCOL: Group = Group {
    name: "protocol",
    purpose: "requests of the supervisor, with descriptors",
    calls: &[
        call("recvfrom", libc::SYS_recvfrom),
        call("recvmsg", libc::SYS_recvmsg),
        SEND,
        when(
            "setsockopt",
            libc::SYS_setsockopt,
            &[
                &[is(1, libc::SOL_SOCKET), is(2, libc::SO_SNDTIMEO)],
                &[is(1, libc::SOL_SOCKET), is(2, libc::SO_RCVTIMEO)],
            ],
            "SO_SNDTIMEO, SO_RCVTIMEO",
        ),
        call("shutdown", libc::SYS_shutdown),
    ],
};

static START: Group = Group {
    name: "start",
    purpose: "starting threads and giving them their filters",
    calls: &[
        when("clone", libc::SYS_clone, &[&[is(0, THREAD)], &[is(0, THREAD | DETACHED)]], "a thread of this process"),
        // Another filter refuses it with the error that makes the C library use `clone` instead, whose flags a filter
        // can compare.
        call("clone3", libc::SYS_clone3),
        when(
            "prctl",
            libc::SYS_prctl,
            &[&[is(0, libc::PR_SET_NAME)], &[is(0, libc::PR_SET_NO_NEW_PRIVS)]],
            "PR_SET_NAME, PR_SET_NO_NEW_PRIVS",
        ),
        call("rseq", libc::SYS_rseq),
        when(
            "rt_sigaction",
            libc::SYS_rt_sigaction,
            &[&[is(0, 32)], &[is(0, 33)]],
            "the two signals that the C library keeps for itself",
        ),
        when(
            "seccomp",
            libc::SYS_seccomp,
            &[&[Is { argument: 0, value: libc::SECCOMP_SET_MODE_FILTER }]],
            "SECCOMP_SET_MODE_FILTER",
        ),
        call("set_robust_list", libc::SYS_set_robust_list),
    ],
};

static ADAPTER: Group = Group {
    name: "adapter",
    purpose: "the host's adapter: its nodes, /sys, neighbours",
    calls: &[
        call("bind", libc::SYS_bind),
        call("connect", libc::SYS_connect),
        when(
            "fcntl",
            libc::SYS_fcntl,
            &[&[is(1, libc::F_SETFD)], &[is(1, libc::F_SETFL), without(2, libc::O_ASYNC)]],
            "F_SETFD, F_SETFL without O_ASYNC",
        ),
        call("fstat", libc::SYS_fstat),
        call("fstatfs", libc::SYS_fstatfs),
        call("getdents64", libc::SYS_getdents64),
        // Before it trusts the environment, the library checks that the process runs as the user that started it.
        call("getegid", libc::SYS_getegid),
        call("geteuid", libc::SYS_geteuid),
        call("getgid", libc::SYS_getgid),
        call("getsockname", libc::SYS_getsockname),
        call("getuid", libc::SYS_getuid),
        when(
            "ioctl",
            libc::SYS_ioctl,
            &[&[Bits { argument: 1, mask: 0xff00, value: RDMA_IOCTL << 8 }], &[Is { argument: 1, value: FIONBIO }]],
            "requests of type 0x1b (rdma/rdma_user_ioctl.h), FIONBIO",
        ),
        call("lseek", libc::SYS_lseek),
        when("mmap", libc::SYS_mmap, &[&[without(2, libc::PROT_EXEC)]], "not PROT_EXEC"),
        when(
            "openat",
            libc::SYS_openat,
            &[&[without(2, libc::O_CREAT | libc::O_TRUNC | TMPFILE)]],
            "existing files, as far as Landlock permits",
        ),
        call("pread64", libc::SYS_pread64),
        call("pselect6", libc::SYS_pselect6),
        call("recvfrom", libc::SYS_recvfrom),
        call("recvmsg", libc::SYS_recvmsg),
        call("setsockopt", libc::SYS_setsockopt),
        when(
            "socket",
            libc::SYS_socket,
            &[
                &[is(0, libc::AF_NETLINK)],
                &[is(0, libc::AF_INET), Bits { argument: 1, mask: 0xf, value: bits(libc::SOCK_DGRAM) }],
                &[is(0, libc::AF_INET6), Bits { argument: 1, mask: 0xf, value: bits(libc::SOCK_DGRAM) }],
            ],
            "netlink, UDP: how libibverbs finds a neighbour's MAC address",
        ),
        call("uname", libc::SYS_uname),
        #[cfg(target_arch = "x86_64")]
        call("select", libc::SYS_select),
    ],
};

static LOAD: Group = Group {
    name: "load",
    purpose: "loading libibverbs and the adapter's library",
    calls: &[call("mmap", libc::SYS_mmap), call("mprotect", libc::SYS_mprotect)],
};

/// System calls with which libibverbs examines the system, for the host's adapter.
static LOOK: Group = Group {
    name: "look",
    purpose: "names and attributes of files",
    calls: &[
        call("faccessat", libc::SYS_faccessat),
        call("faccessat2", libc::SYS_faccessat2),
        call("getcwd", libc::SYS_getcwd),
        call("newfstatat", libc::SYS_newfstatat),
        call("readlinkat", libc::SYS_readlinkat),
        call("statx", libc::SYS_statx),
        #[cfg(target_arch = "x86_64")]
        call("access", libc::SYS_access),
        #[cfg(target_arch = "x86_64")]
        call("readlink", libc::SYS_readlink),
    ],
};

/// Further system calls with which libraries look for files.
pub(super) static OPEN: Group = Group {
    name: "open",
    purpose: "opening files: where a thread may not `look`, both are refused with EACCES",
    calls: &[
        call("openat", libc::SYS_openat),
        #[cfg(target_arch = "x86_64")]
        call("open", libc::SYS_open),
    ],
};

/// The ioctl of `set_nonblocking`.
const FIONBIO: u32 = 0x5421;
/// `RDMA_IOCTL_MAGIC`.
const RDMA_IOCTL: u32 = 0x1b;
/// `O_TMPFILE` without `O_DIRECTORY`, which it contains.
const TMPFILE: i32 = libc::O_TMPFILE & !libc::O_DIRECTORY;

/// Returns the calls with which libraries look for optional files. They fail, even where other unknown calls end the
/// process.
pub(super) fn lookups() -> impl Iterator<Item = c_long> {
    [&LOOK, &OPEN].into_iter().flat_map(|group| group.calls).map(|call| call.number)
}

/// Returns the groups of a kind of thread.
pub(super) fn groups(profile: Profile, kind: ThreadKind) -> Vec<&'static Group> {
    let mut groups: Vec<&Group> = match kind {
        ThreadKind::Main => vec![&RUNTIME, &PROTOCOL, &GUEST, &LINK, &LEND],
        ThreadKind::Launcher => return base(profile),
        ThreadKind::Supervisor => vec![&RUNTIME, &PROTOCOL],
        ThreadKind::Accept => vec![&RUNTIME, &ACCEPT, &GUEST, &ASK, &LEND],
        ThreadKind::Connection => vec![&RUNTIME, &CLIENT, &GUEST, &ASK, &LEND],
        ThreadKind::Doorbells => vec![&RUNTIME, &GUEST, &ASK, &PACE],
        ThreadKind::DoorbellPages => vec![&RUNTIME],
        ThreadKind::Pin => vec![&RUNTIME, &PIN],
        ThreadKind::Interrupts => vec![&RUNTIME, &SIGNAL],
        ThreadKind::Capture => vec![&RUNTIME, &CAPTURE],
        ThreadKind::Engine | ThreadKind::HostEvents | ThreadKind::HostManagement => vec![&RUNTIME, &GUEST, &ASK],
        // The thread of a switch also runs the receive path of ports.
        ThreadKind::Port | ThreadKind::Switch => vec![&RUNTIME, &LINK, &GUEST, &ASK],
        ThreadKind::Handshake => vec![&RUNTIME, &LINK, &ASK],
    };
    let is_link = groups.iter().any(|group| [LINK.name, GUEST.name].contains(&group.name));
    match profile {
        Profile::RxeAddressed if is_link => groups.push(&ADDRESSED),
        Profile::Ibverbs if is_link => groups.extend([&ADAPTER, &ADDRESSED, &LOOK]),
        _ => {}
    }
    groups
}

/// Returns the groups of a fallback server, which guards doorbell pages.
pub(super) fn alone() -> Vec<&'static Group> {
    vec![&RUNTIME, &GUARD]
}

/// Returns the groups of a keeper.
pub(super) fn keeper() -> Vec<&'static Group> {
    vec![&KEEPER]
}

/// Returns the groups that every thread needs. The launcher needs all groups, because its filter also applies to the
/// threads that it starts.
pub(super) fn base(profile: Profile) -> Vec<&'static Group> {
    let mut groups: Vec<&Group> =
        vec![&RUNTIME, &GUEST, &CLIENT, &ACCEPT, &LINK, &PIN, &SIGNAL, &PACE, &CAPTURE, &PROTOCOL, &ASK, &START, &LEND];
    match profile {
        Profile::RxeAddressed => groups.push(&ADDRESSED),
        Profile::Rxe => {}
        Profile::Ibverbs => groups.extend([&ADDRESSED, &ADAPTER, &LOOK, &LOAD]),
    }
    groups
}
