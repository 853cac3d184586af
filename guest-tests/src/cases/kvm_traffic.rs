//! Programs that communicate with a guest while it moves. Each has a count that grows as long as it makes progress.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};

use super::kvm_saved::PATIENT;
use super::nvme;
use crate::endpoints::listens;
use crate::pair::PVRDMA_DEVICE;
use crate::vm::{Job, Vm};

/// RDMA device of the host.
const HOST_DEVICE: &str = "rxe0";
/// Size in MiB of the data that are written to the disk and verified again and again.
const VERIFIED: u32 = 2;
/// Port of the TCP server.
const TCP_PORT: u16 = 5201;
/// Default port of perftest.
const PERFTEST_PORT: u16 = 18515;

/// A machine, and its address.
pub(super) type Place<'a> = (&'a Vm, Ipv4Addr);

/// A shell condition: a program listens on a port of the connection manager.
fn listens_for_rdma(port: u16) -> String {
    format!("rdma resource show cm_id | grep LISTEN | grep -q ':{port} '")
}

/// A program, with its counterpart on the same or another machine.
pub(super) struct Traffic<'a> {
    name: String,
    /// Machine of the program that counts.
    at: &'a Vm,
    /// Command that prints the count.
    count: String,
    /// Difference of two counts that shows progress.
    step: u64,
    programs: Vec<Job>,
    /// Machines of an NVMe target and host that are connected.
    disk: Option<[&'a Vm; 2]>,
}

impl<'a> Traffic<'a> {
    /// Starts messages of `rping` to a server, which come back and are compared.
    pub(super) fn pings(from: &'a Vm, (to, address): Place<'a>, port: u16) -> Result<Self> {
        let server = to.spawn(&format!("rping -s -V -S 64 -a {address} -p {port}"))?;
        to.wait_until(&listens_for_rdma(port), PATIENT)?;
        let client = format!("rping -c -V -v -S 64 -a {address} -p {port}");
        Self::counting_lines(format!("pings-{port}"), from, &client, 5, server)
    }

    /// Starts RDMA WRITEs of a guest to the host, without an end.
    pub(super) fn writes(from: &'a Vm, (to, address): Place<'a>) -> Result<Self> {
        let command = |device: &str| format!("ib_write_bw -F -R -u 20 -d {device} -s 65536 --run_infinitely");
        let server = to.spawn(&command(HOST_DEVICE))?;
        to.wait_until(&listens_for_rdma(PERFTEST_PORT), PATIENT)?;
        let client = format!("{} {address}", command(PVRDMA_DEVICE));
        Self::counting_lines("writes".to_owned(), from, &client, 2, server)
    }

    /// Starts a TCP stream over the network function.
    pub(super) fn stream(from: &'a Vm, (to, address): Place<'a>) -> Result<Self> {
        let server = to.spawn(&format!("iperf3 -s -1 -B {address} -p {TCP_PORT}"))?;
        to.wait_until(&listens(TCP_PORT), PATIENT)?;
        let client = format!("iperf3 -c {address} -p {TCP_PORT} -t 0 -i 1 --forceflush");
        Self::counting_lines("stream".to_owned(), from, &client, 2, server)
    }

    /// Connects a disk of the host by NVMe over RDMA, and starts a loop that writes to it and verifies each byte.
    pub(super) fn disk(from: &'a Vm, (to, address): Place<'a>) -> Result<Self> {
        nvme::connect([to, from], address)?;
        let verify =
            from.spawn(&format!("while {} >/run/disk; do :; done; cat /run/disk", nvme::verify(VERIFIED, 1)))?;
        let count = "awk '{ print $1 + $5 }' /sys/block/nvme0n1/stat".to_owned();
        let traffic =
            Self { name: "disk".to_owned(), at: from, count, step: 20, programs: vec![verify], disk: Some([to, from]) };
        traffic.started()
    }

    fn counting_lines(name: String, from: &'a Vm, client: &str, step: u64, server: Job) -> Result<Self> {
        let file = format!("/run/{name}");
        let client = from.spawn(&format!("stdbuf -oL {client} > {file}"))?;
        let count = format!("cat {file} | wc -l");
        Self { name, at: from, count, step, programs: vec![client, server], disk: None }.started()
    }

    fn started(self) -> Result<Self> {
        self.continues().context("before the migration")?;
        Ok(self)
    }

    /// Returns a note for the report.
    pub(super) fn note(&self) -> Result<String> {
        Ok(format!("{} {}", self.name, self.progress()?))
    }

    fn progress(&self) -> Result<u64> {
        self.at.run(&self.count)?.trim().parse().with_context(|| format!("count of {}", self.name))
    }

    /// Checks that the program makes progress.
    pub(super) fn continues(&self) -> Result<()> {
        let aim = self.progress()?.saturating_add(self.step);
        let progress = self.at.wait_until(&format!("[ $({}) -ge {aim} ]", self.count), PATIENT);
        progress.with_context(|| self.diagnosis())
    }

    fn diagnosis(&self) -> String {
        let outputs = self.programs.iter().map(|job| format!("{}\n{}", job.title(), job.output()));
        format!("{} makes no progress\n{}", self.name, outputs.collect::<Vec<_>>().join("\n"))
    }

    /// Ends the programs, which must not have ended.
    pub(super) fn end(self) -> Result<()> {
        for job in &self.programs {
            ensure!(job.is_running(), "{} has ended: {}\n{}", self.name, job.title(), job.output());
        }
        self.programs.iter().try_for_each(Job::kill)?;
        self.disk.map_or(Ok(()), nvme::disconnect)
    }
}
