//! What is run between two guests whose devices reach each other over a wire: the same programs, whatever the wire is.

use std::rc::Rc;

use anyhow::Result;

use super::case::{Case, WAYS};
use super::shared::{Machines, Shared};
use super::{connection, perftest, pingpong};
use crate::ends::Ends;

/// A program with its options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    /// In the case's name.
    name: &'static str,
    kind: Kind,
}

/// How it is started and what its output must say.
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
    /// Runs it with its server in guest `server`.
    pub(crate) fn run(&self, ends: &Ends<'_>, server: usize) -> Result<String> {
        match self.kind {
            Kind::PingPong(program, options) => pingpong::pingpong(ends, server, program, options),
            Kind::Perftest(program, options, rows) => perftest::table(ends, server, program, options, rows),
            Kind::Rping => connection::rping(ends, server),
            Kind::AddressPair(program) => connection::address_pair(ends, server, program),
        }
    }
}

const fn pingpong(name: &'static str, program: &'static str, options: &'static str) -> Program {
    Program { name, kind: Kind::PingPong(program, options) }
}

const fn perftest(name: &'static str, program: &'static str, options: &'static str, rows: usize) -> Program {
    Program { name, kind: Kind::Perftest(program, options, rows) }
}

/// Every program once, each in about half a second where the guests' processors are emulated.
pub(crate) const PROGRAMS: [Program; 17] = [
    pingpong("rc_pingpong", "ibv_rc_pingpong", "-c -n 200"),
    pingpong("rc_pingpong-64K-events", "ibv_rc_pingpong", "-c -e -s 65536 -n 20"),
    pingpong("ud_pingpong", "ibv_ud_pingpong", "-s 1024 -n 200"),
    pingpong("srq_pingpong", "ibv_srq_pingpong", "-n 50 -q 4"),
    perftest("send_bw", "ib_send_bw", "-n 50 -s 65536", 1),
    perftest("write_bw", "ib_write_bw", "-n 50 -s 65536", 1),
    perftest("read_bw", "ib_read_bw", "-n 50 -s 65536", 1),
    perftest("atomic_bw", "ib_atomic_bw", "-n 200", 1),
    perftest("send_lat", "ib_send_lat", "-n 100 -s 5000", 1),
    perftest("write_lat", "ib_write_lat", "-n 100 -s 5000", 1),
    perftest("read_lat", "ib_read_lat", "-n 100 -s 5000", 1),
    perftest("atomic_lat", "ib_atomic_lat", "-A CMP_AND_SWAP -n 100", 1),
    perftest("send_bw-ud", "ib_send_bw", "-c UD -n 200 -s 1024", 1),
    perftest("send_lat-ud", "ib_send_lat", "-c UD -n 100 -s 1024", 1),
    Program { name: "rping", kind: Kind::Rping },
    Program { name: "udaddy", kind: Kind::AddressPair("udaddy") },
    Program { name: "ucmatose", kind: Kind::AddressPair("ucmatose") },
];

/// All sizes from 2 octets to 8 MiB, which takes a software transport in a guest many seconds each.
pub(crate) const ALL_SIZES: [Program; 6] = [
    perftest("send_bw-all-sizes", "ib_send_bw", "-a -n 5", 23),
    perftest("write_bw-all-sizes", "ib_write_bw", "-a -n 5", 23),
    perftest("read_bw-all-sizes", "ib_read_bw", "-a -n 5", 23),
    perftest("send_lat-all-sizes", "ib_send_lat", "-a -n 5", 23),
    perftest("write_lat-all-sizes", "ib_write_lat", "-a -n 5", 23),
    perftest("read_lat-all-sizes", "ib_read_lat", "-a -n 5", 23),
];

/// Cases `group/program/way`, both ways. `ends` says how the programs reach each other.
pub(crate) fn cases<M: Machines>(
    group: &str,
    programs: &[Program],
    shared: &Rc<Shared<M>>,
    ends: impl Fn(&M) -> Result<Ends<'_>> + Copy + 'static,
) -> Vec<Case> {
    let both = programs.iter().flat_map(|&program| WAYS.map(|way| (program, way)));
    both.map(|(program, (server, way))| {
        shared.case(format!("{group}/{}/{way}", program.name), move |machines| program.run(&ends(machines)?, server))
    })
    .collect()
}
