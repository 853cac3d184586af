//! Settings of the rules for this repository: the one table of folders, names and limits.

/// The settings of all rules.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Folders in a package whose files are not product.
    pub test_folders: &'static [&'static str],
    /// Module folders whose files serve tests of other crates.
    pub testing_folders: &'static [&'static str],
    /// Folders that are not read at all.
    pub skipped_folders: &'static [&'static str],
    /// A file that defines items depends on the items that it re-exports. A file that defines none never does.
    pub reexports_are_arrows: bool,
    /// The members of the workspace, from the bottom layer to the top one.
    pub layers: &'static [&'static [&'static str]],
    /// The layers of modules in a crate.
    pub module_layers: ModuleLayers,
    /// The crates without input, output and clocks.
    pub pure: PureCrates,
    /// The one file that starts threads.
    pub threads: Threads,
    /// The folder in which each wait has a deadline.
    pub deadlines: Deadlines,
    /// The document that lists the atomics.
    pub atomics: Atomics,
    /// The file and the folders that may log without a limit.
    pub logs: Logs,
    /// Lines that a product file may have.
    pub file_lines: usize,
    /// Lines that a function may have, from `fn` to its closing brace.
    pub function_lines: usize,
    /// Columns that a comment line may have.
    pub comment_columns: usize,
    /// Files that the rule about words skips: those that must spell the forbidden words.
    pub words_unchecked: &'static [&'static str],
}

/// The layers of modules in a crate.
#[derive(Clone, Copy, Debug)]
pub struct ModuleLayers {
    /// The folder of the modules. It ends in `/`.
    pub folder: &'static str,
    /// The layers, from the bottom to the top.
    pub layers: &'static [ModuleLayer],
}

/// A layer of modules.
#[derive(Clone, Copy, Debug)]
pub struct ModuleLayer {
    /// Its name.
    pub name: &'static str,
    /// Names of top-level modules: folders or files, without `.rs`.
    pub modules: &'static [&'static str],
    /// Names of lower layers from which it imports nothing.
    pub apart_from: &'static [&'static str],
}

/// The crates that may not know input, output and clocks.
#[derive(Clone, Copy, Debug)]
pub struct PureCrates {
    /// Their folders. The rule has nothing to do for a folder that does not exist.
    pub folders: &'static [&'static str],
    /// Paths that they may not name, each with everything below it; `core` and `alloc` count as `std`.
    pub forbidden: &'static [&'static str],
    /// Methods that read a clock, whatever they are called on.
    pub forbidden_methods: &'static [&'static str],
    /// Macros of the prelude that write somewhere.
    pub forbidden_macros: &'static [&'static str],
    /// The only dependencies that they may have. None of them does input or output or reads a clock.
    pub dependencies: &'static [&'static str],
    /// Names that they may use nevertheless.
    pub exceptions: &'static [PurityException],
}

/// A file of a pure crate that may use a name that is forbidden elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct PurityException {
    /// The file, from the root of the repository.
    pub file: &'static str,
    /// The full path of the name.
    pub name: &'static str,
    /// Reason why this is harmless.
    pub reason: &'static str,
}

/// The one file that starts threads.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    /// The file, from the root of the repository.
    pub home: &'static str,
    /// Paths that no other product file may name, each with everything below it.
    pub forbidden: &'static [&'static str],
    /// Files and folders that may nevertheless, each with the reason. A folder ends in `/`.
    pub exceptions: &'static [(&'static str, &'static str)],
}

/// The folder in which no wait may last forever.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// The folder. It ends in `/`.
    pub folder: &'static str,
    /// Methods that wait forever where they take nothing but a guard.
    pub methods: &'static [&'static str],
    /// Files, methods that they may call nevertheless, and the reason.
    pub exceptions: &'static [(&'static str, &'static str, &'static str)],
}

/// The list of atomics, which threads share without a lock.
#[derive(Clone, Copy, Debug)]
pub struct Atomics {
    /// The document, from the root of the repository.
    pub document: &'static str,
    /// The folder of the types that have models. It ends in `/`.
    pub home: &'static str,
}

/// The one file that logs without a limit.
#[derive(Clone, Copy, Debug)]
pub struct Logs {
    /// The file, from the root of the repository.
    pub home: &'static str,
    /// Macros that no other product file may call without a reason.
    pub forbidden: &'static [&'static str],
    /// Folders that may nevertheless, each with the reason.
    pub exceptions: &'static [(&'static str, &'static str)],
}

/// The settings for this repository.
pub const REPOSITORY: Config = Config {
    test_folders: &["tests", "benches", "examples", "fuzz"],
    testing_folders: &["testing", "conformance"],
    skipped_folders: &["target", "corpus", "artifacts"],
    reexports_are_arrows: true,
    layers: &[
        &[
            "pvrdma-base",
            "pvrdma-handover",
            "pvrdma-packet",
            "pvrdma-pages",
            "pvrdma-pci-function",
            "pvrdma-saved-state",
            "source-rules",
        ],
        &["pvrdma-guest-memory", "pvrdma-pci-slot", "pvrdma-verbs-types"],
        &["pvrdma-ib-cm", "pvrdma-iwarp", "pvrdma-link", "pvrdma-roce", "pvrdma-verbs"],
        &["pvrdma-ether-link", "pvrdma-pacing"],
        &["fabric-sim", "pvrdma-dev", "pvrdma-ibverbs", "pvrdma-rxe", "pvrdma-vfio-user-server", "pvrdma-vmxnet3"],
        &["pvrdma-lab", "pvrdma-vmm", "pvrdmad"],
        &["guest-tests"],
    ],
    module_layers: ModuleLayers { folder: "pvrdmad/src/", layers: DAEMON },
    pure: PureCrates {
        folders: &["crates/ib-cm", "crates/iwarp", "crates/roce"],
        forbidden: &[
            "std::env",
            "std::fs",
            "std::io",
            "std::net::TcpListener",
            "std::net::TcpStream",
            "std::net::ToSocketAddrs",
            "std::net::UdpSocket",
            "std::os",
            "std::process",
            "std::sync::Barrier",
            "std::sync::Condvar",
            "std::sync::Mutex",
            "std::sync::RwLock",
            "std::sync::mpsc",
            "std::thread",
            "std::time::Instant::now",
            "std::time::SystemTime",
            "std::time::UNIX_EPOCH",
            "crossbeam",
            "libc",
            "nix",
            "parking_lot",
            "rustix",
            "signal_hook",
            "socket2",
            "tempfile",
            "tokio",
            "vm_memory",
            "vmm_sys_util",
        ],
        forbidden_methods: &["elapsed"],
        forbidden_macros: &["dbg", "eprint", "eprintln", "print", "println"],
        dependencies: &[
            "crc32c",
            "crc32fast",
            "pvrdma-packet",
            "pvrdma-pages",
            "pvrdma-saved-state",
            "pvrdma-verbs-types",
            "serde",
            "thiserror",
        ],
        exceptions: &[],
    },
    atomics: Atomics { document: "docs/dev/atomics.md", home: "crates/handover/" },
    threads: Threads {
        home: "crates/base/src/threads.rs",
        forbidden: &[
            "std::thread::Builder",
            "std::thread::scope",
            "std::thread::spawn",
            "libc::clone",
            "libc::pthread_create",
            "nix::sched::clone",
        ],
        exceptions: &[
            ("guest-tests/", "the test suite, which serves no guest of others"),
            ("lab/", "the programs that boot guests, which serve no guest of others"),
            ("pvrdmad/src/capture/client.rs", "the command that asks the daemon"),
            ("pvrdma-vmm/", "an example of a VMM, which confines no thread"),
        ],
    },
    deadlines: Deadlines {
        folder: "pvrdmad/src/supervisor/",
        methods: &["join", "output", "recv", "status", "wait", "wait_with_output"],
        exceptions: &[
            ("pvrdmad/src/supervisor/joining.rs", "join", "the thread has said that it is at its end"),
            (
                "pvrdmad/src/supervisor/process.rs",
                "recv",
                "the thread gives each request of a start a deadline, and its end disconnects the channel",
            ),
            (
                "pvrdmad/src/supervisor/hand_over.rs",
                "recv",
                "the other supervisor has a deadline for all networks, and the end of its thread disconnects the channel",
            ),
            (
                "pvrdmad/src/supervisor/replace/take.rs",
                "recv",
                "the thread gives each request of a start a deadline, and its end disconnects the channel",
            ),
            (
                "pvrdmad/src/supervisor/replace/start.rs",
                "wait",
                "a thread of its own, which no other thread waits for, reaps the new program",
            ),
        ],
    },
    logs: Logs {
        home: "crates/base/src/log_limit.rs",
        forbidden: &["log::error", "log::info", "log::log", "log::warn"],
        exceptions: &[
            ("guest-tests/", "the test suite, which serves no guest of others"),
            ("lab/", "the programs that boot guests, which serve no guest of others"),
        ],
    },
    file_lines: 500,
    function_lines: 60,
    comment_columns: 120,
    words_unchecked: &[
        "crates/source-rules/src/words.rs",
        "crates/source-rules/tests/seeded/words.rs",
        "docs/dev/writing.md",
    ],
};

/// The layers of the daemon. `docs/dev/crates.md` describes them.
const DAEMON: &[ModuleLayer] = &[
    ModuleLayer {
        name: "base",
        modules: &["control_path", "fault_point", "lib", "logging", "notify", "socket", "stop", "text"],
        apart_from: &[],
    },
    ModuleLayer { name: "sandbox", modules: &["sandbox"], apart_from: &[] },
    ModuleLayer { name: "configuration", modules: &["config", "rlimits"], apart_from: &[] },
    ModuleLayer { name: "doorbells", modules: &["doorbells", "keeper"], apart_from: &[] },
    ModuleLayer { name: "reports", modules: &["events", "failures", "status"], apart_from: &[] },
    ModuleLayer { name: "protocol", modules: &["control", "protocol"], apart_from: &[] },
    ModuleLayer { name: "worker", modules: &["worker"], apart_from: &[] },
    ModuleLayer { name: "supervisor", modules: &["metrics", "supervisor"], apart_from: &[] },
    ModuleLayer {
        name: "daemon",
        modules: &["control_access", "control_server", "daemon", "service"],
        apart_from: &["worker"],
    },
    ModuleLayer {
        name: "tools",
        modules: &[
            "capture",
            "check",
            "cli",
            "complete",
            "history",
            "man",
            "package",
            "saved_file",
            "since",
            "top",
            "vmx",
            "xml",
        ],
        apart_from: &["worker", "supervisor", "daemon"],
    },
    ModuleLayer { name: "program", modules: &["main"], apart_from: &[] },
];
