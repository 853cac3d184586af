//! Shared receive queues, which only processes can have.

use super::command::{CommandError, Request, command_id};
use super::wr::RecvWr;
use super::{Directory, Driver, DriverRing, Pd, Placement, RingFull};

const UAR_SRQ: u64 = 8;
const SRQ_RECV: u32 = 1 << 30;

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    driver: Driver,
    /// Its handle.
    pub handle: u32,
    /// UAR page of its owner.
    pub uar: u32,
    ring: DriverRing,
    pages: Vec<u64>,
    directory: Directory,
}

impl Driver {
    /// CREATE_SRQ. The library takes twice the pages that the elements need (spec §13 B22).
    ///
    /// # Errors
    /// The command failed.
    pub fn create_srq(&self, pd: &Pd, max_wr: u32, max_sge: u32, limit: u32) -> Result<Srq, CommandError> {
        let (max_wr, max_sge) = (max_wr.next_power_of_two(), max_sge.max(1));
        let stride = (16 + 16 * u64::from(max_sge)).next_power_of_two();
        let memory = &self.0.memory;
        let count = 1 + 2 * (u64::from(max_wr) * stride).div_ceil(4096) as usize;
        let pages = memory.alloc(count, Placement::Scattered);
        let directory = memory.directory(&pages);
        let request = Request::new(command_id::CREATE_SRQ).u64(16, directory.addr).u32(24, pd.handle);
        let request = request.u32(28, count as u32).u32(32, max_wr).u32(36, max_sge).u32(40, limit);
        match self.execute(&request) {
            Ok(response) => {
                let ring = DriverRing::new(memory, pages[0] + 8, &pages[1..], stride, max_wr);
                Ok(Srq { driver: self.clone(), handle: response.u32(16), uar: pd.uar, ring, pages, directory })
            }
            Err(error) => {
                memory.free(&pages);
                memory.free_directory(&directory);
                Err(error)
            }
        }
    }
}

impl Srq {
    /// Returns its ring.
    pub const fn ring(&self) -> &DriverRing {
        &self.ring
    }

    /// Returns all pages, ring state first.
    pub fn pages(&self) -> &[u64] {
        &self.pages
    }

    /// Posts receives, one doorbell for all.
    ///
    /// # Errors
    /// There is no room; the requests before it are posted, without a doorbell.
    pub fn post(&mut self, requests: &[RecvWr]) -> Result<(), RingFull> {
        for request in requests {
            let slot = self.ring.has_space().ok_or(RingFull)?;
            self.ring.memory().write(self.ring.slot(slot), &request.encode());
            self.ring.produce();
        }
        self.ring_recv();
        Ok(())
    }

    /// Rings the doorbell.
    pub fn ring_recv(&self) {
        self.driver.pci().doorbell(self.uar, UAR_SRQ, self.handle | SRQ_RECV);
    }

    /// MODIFY_SRQ: arms the limit.
    ///
    /// # Errors
    /// The command failed.
    pub fn set_limit(&self, limit: u32) -> Result<(), CommandError> {
        let request = Request::new(command_id::MODIFY_SRQ).u32(16, self.handle).u32(20, 2).u32(32, limit);
        self.driver.execute(&request).map(drop)
    }

    /// QUERY_SRQ: sizes and limit.
    ///
    /// # Errors
    /// The command failed.
    pub fn query(&self) -> Result<[u32; 3], CommandError> {
        let response = self.driver.execute(&Request::new(command_id::QUERY_SRQ).u32(16, self.handle))?;
        Ok([16, 20, 24].map(|at| response.u32(at)))
    }

    /// DESTROY_SRQ; its pages are freed immediately.
    ///
    /// # Errors
    /// The command failed; the memory is freed nevertheless, as the driver does.
    pub fn destroy(self) -> Result<(), CommandError> {
        let result = self.driver.execute(&Request::new(command_id::DESTROY_SRQ).u32(16, self.handle));
        self.driver.0.memory.free(&self.pages);
        self.driver.0.memory.free_directory(&self.directory);
        result.map(drop)
    }
}
