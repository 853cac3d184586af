//! Programs that run between two guests whose devices reach each other over a wire, independent of the kind of wire.

use std::rc::Rc;

use anyhow::Result;

use super::case::{Case, way};
use super::shared::{Machines, Shared};
use super::{connection, perftest, pingpong};
use crate::endpoints::Endpoints;

/// A program with its options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    /// Name in the case's name.
    name: &'static str,
    kind: Kind,
    /// Guests that run the server, one after the other.
    servers: &'static [usize],
}

/// Start command, and the expected output.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Program and options.
    PingPong(&'static str, &'static str),
    /// Program, options, and rows of its table.
    Perftest(&'static str, &'static str, usize),
    Rping,
    /// Program.
    AddressPair(&'static str),
}

impl Program {
    /// Returns the same program with its server in guest b only.
    pub(crate) const fn one_way(self) -> Self {
        Self { servers: &[1], ..self }
    }

    /// Runs the program with its server in guest `server`.
    pub(crate) fn run(&self, endpoints: &Endpoints<'_>, server: usize) -> Result<String> {
        match self.kind {
            Kind::PingPong(program, options) => pingpong::pingpong(endpoints, server, program, options),
            Kind::Perftest(program, options, rows) => perftest::table(endpoints, server, program, options, rows),
            Kind::Rping => connection::rping(endpoints, server),
            Kind::AddressPair(program) => connection::address_pair(endpoints, server, program),
        }
    }
}

const BOTH: &[usize] = &[1, 0];

const fn pingpong(name: &'static str, program: &'static str, options: &'static str) -> Program {
    Program { name, kind: Kind::PingPong(program, options), servers: BOTH }
}

const fn perftest(name: &'static str, program: &'static str, options: &'static str) -> Program {
    Program { name, kind: Kind::Perftest(program, options, 1), servers: BOTH }
}

/// All sizes from 2 bytes to 8 MiB. This takes many seconds on emulated processors, so one guest serves bandwidth, the
/// other latency.
const fn all_sizes(
    name: &'static str,
    program: &'static str,
    options: &'static str,
    servers: &'static [usize],
) -> Program {
    Program { name, kind: Kind::Perftest(program, options, 23), servers }
}

/// Programs with connections. With `-C` latency is reported in cycles: perftest needs a third of a second for each size
/// to measure the length of a cycle. Each takes about half a second on emulated processors.
pub(crate) const CONNECTED: [Program; 13] = [
    pingpong("rc_pingpong", "ibv_rc_pingpong", "-c -n 200"),
    pingpong("rc_pingpong-64K-events", "ibv_rc_pingpong", "-c -e -s 65536 -n 20"),
    pingpong("srq_pingpong", "ibv_srq_pingpong", "-n 50 -q 4"),
    perftest("send_bw", "ib_send_bw", "-n 50 -s 65536"),
    perftest("write_bw", "ib_write_bw", "-n 50 -s 65536"),
    perftest("read_bw", "ib_read_bw", "-n 50 -s 65536"),
    perftest("atomic_bw", "ib_atomic_bw", "-n 200"),
    perftest("send_lat", "ib_send_lat", "-C -n 100 -s 8192"),
    perftest("write_lat", "ib_write_lat", "-C -n 100 -s 8192"),
    perftest("read_lat", "ib_read_lat", "-C -n 100 -s 8192"),
    perftest("atomic_lat", "ib_atomic_lat", "-C -A CMP_AND_SWAP -n 100"),
    RPING,
    UCMATOSE,
];

const RPING: Program = Program { name: "rping", kind: Kind::Rping, servers: BOTH };
const UCMATOSE: Program = Program { name: "ucmatose", kind: Kind::AddressPair("ucmatose"), servers: BOTH };

/// Programs whose path MTU the connection manager negotiates.
pub(crate) const MANAGED: [Program; 2] = [RPING, UCMATOSE];

/// Programs with datagrams. The guest's library creates address handles only for link-local IPv6 addresses.
pub(crate) const DATAGRAMS: [Program; 4] = [
    pingpong("ud_pingpong", "ibv_ud_pingpong", "-s 1024 -n 200"),
    perftest("send_bw-ud", "ib_send_bw", "-c UD -n 200 -s 1024"),
    perftest("send_lat-ud", "ib_send_lat", "-C -c UD -n 100 -s 1024"),
    Program { name: "udaddy", kind: Kind::AddressPair("udaddy"), servers: BOTH },
];

/// One program of each kind, in one direction.
pub(crate) const SMOKE: [Program; 4] = [
    pingpong("rc_pingpong", "ibv_rc_pingpong", "-c -n 200").one_way(),
    pingpong("ud_pingpong", "ibv_ud_pingpong", "-s 1024 -n 200").one_way(),
    perftest("write_bw", "ib_write_bw", "-n 50 -s 65536").one_way(),
    RPING.one_way(),
];

/// One program of each kind and operation, in one direction, for machines on which each takes many seconds.
pub(crate) const EACH_OPERATION: [Program; 7] = [
    pingpong("rc_pingpong", "ibv_rc_pingpong", "-c -n 50").one_way(),
    pingpong("ud_pingpong", "ibv_ud_pingpong", "-s 1024 -n 50").one_way(),
    perftest("send_bw", "ib_send_bw", "-n 50 -s 65536").one_way(),
    perftest("write_bw", "ib_write_bw", "-n 50 -s 65536").one_way(),
    perftest("read_bw", "ib_read_bw", "-n 50 -s 65536").one_way(),
    perftest("atomic_bw", "ib_atomic_bw", "-n 200").one_way(),
    RPING.one_way(),
];

/// Programs that poll and programs that sleep, with connections, datagrams and shared receive queues, in one direction.
pub(crate) const POLL_AND_SLEEP: [Program; 7] = [
    pingpong("rc_pingpong", "ibv_rc_pingpong", "-c -n 200").one_way(),
    pingpong("rc_pingpong-events", "ibv_rc_pingpong", "-c -e -n 100").one_way(),
    pingpong("ud_pingpong", "ibv_ud_pingpong", "-s 1024 -n 50").one_way(),
    pingpong("srq_pingpong-events", "ibv_srq_pingpong", "-e -n 50 -q 4").one_way(),
    perftest("write_lat", "ib_write_lat", "-C -n 100 -s 8").one_way(),
    perftest("send_bw-events", "ib_send_bw", "-e -n 50 -s 65536").one_way(),
    RPING.one_way(),
];

/// Programs whose connections wait for seconds: for a wire between machines that sometimes stop for a while. The
/// ping-pongs give up after half a second.
pub(crate) const PATIENT: [Program; 8] = [
    pingpong("rc_pingpong", "ibv_rc_pingpong", "-c -n 50").one_way(),
    perftest("send_bw", "ib_send_bw", "-u 20 -n 20 -s 65536").one_way(),
    perftest("write_bw", "ib_write_bw", "-u 20 -n 20 -s 65536").one_way(),
    perftest("read_bw", "ib_read_bw", "-u 20 -n 20 -s 65536").one_way(),
    perftest("atomic_bw", "ib_atomic_bw", "-u 20 -n 100").one_way(),
    perftest("write_lat", "ib_write_lat", "-C -u 20 -n 20 -s 8192").one_way(),
    RPING.one_way(),
    UCMATOSE.one_way(),
];

/// Programs with thousands of packets, some of which a bad cable loses.
pub(crate) const LOSSY: [Program; 4] = [
    perftest("send_bw", "ib_send_bw", "-n 50 -s 65536"),
    perftest("write_bw", "ib_write_bw", "-n 50 -s 65536"),
    perftest("read_bw", "ib_read_bw", "-n 50 -s 65536"),
    perftest("atomic_bw", "ib_atomic_bw", "-n 1000"),
];

/// perftest with all sizes.
pub(crate) const ALL_SIZES: [Program; 6] = [
    all_sizes("send_bw-all-sizes", "ib_send_bw", "-a -n 5", &[1]),
    all_sizes("write_bw-all-sizes", "ib_write_bw", "-a -n 5", &[1]),
    all_sizes("read_bw-all-sizes", "ib_read_bw", "-a -n 5", &[1]),
    all_sizes("send_lat-all-sizes", "ib_send_lat", "-C -a -n 5", &[0]),
    all_sizes("write_lat-all-sizes", "ib_write_lat", "-C -a -n 5", &[0]),
    all_sizes("read_lat-all-sizes", "ib_read_lat", "-C -a -n 5", &[0]),
];

/// Returns the cases `group/program/way`. `run` runs a program with its server in one guest.
pub(crate) fn cases<M: Machines>(
    group: &str,
    programs: &[Program],
    shared: &Rc<Shared<M>>,
    run: impl Fn(&M, &Program, usize) -> Result<String> + Copy + 'static,
) -> Vec<Case> {
    let ways = programs.iter().flat_map(|&program| program.servers.iter().map(move |&server| (program, server)));
    ways.map(|(program, server)| {
        let name = format!("{group}/{}/{}", program.name, way(server));
        shared.case(name, move |machines| run(machines, &program, server))
    })
    .collect()
}
