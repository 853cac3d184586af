//! Completion queues.

use std::sync::Arc;

use super::command::{CommandError, Request, command_id};
use super::{Context, Directory, Driver, DriverRing, Placement, wait_for};

/// Size of an entry in bytes.
const CQE: u64 = 64;

const UAR_CQ: u64 = 4;
const ARM_SOL: u32 = 1 << 29;
const ARM: u32 = 1 << 30;
const POLL: u32 = 1 << 31;

/// Completion status (spec §9.3).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod status {
    pub const SUCCESS: u32 = 0;
    pub const LOC_LEN: u32 = 1;
    pub const LOC_QP_OP: u32 = 2;
    pub const LOC_PROT: u32 = 4;
    pub const WR_FLUSH: u32 = 5;
    pub const MW_BIND: u32 = 6;
    pub const BAD_RESP: u32 = 7;
    pub const LOC_ACCESS: u32 = 8;
    pub const REM_INV_REQ: u32 = 9;
    pub const REM_ACCESS: u32 = 10;
    pub const REM_OP: u32 = 11;
    pub const RETRY_EXC: u32 = 12;
    pub const RNR_RETRY_EXC: u32 = 13;
    pub const GENERAL: u32 = 21;
}

/// Completion opcodes (spec §9.2).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod wc_opcode {
    pub const SEND: u32 = 0;
    pub const RDMA_WRITE: u32 = 1;
    pub const RDMA_READ: u32 = 2;
    pub const COMP_SWAP: u32 = 3;
    pub const FETCH_ADD: u32 = 4;
    pub const LOCAL_INV: u32 = 7;
    pub const FAST_REG_MR: u32 = 8;
    pub const RECV: u32 = 128;
    pub const RECV_RDMA_WITH_IMM: u32 = 129;
}

/// Completion flags (spec §9.2).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod wc_flag {
    pub const GRH: u32 = 1;
    pub const WITH_IMM: u32 = 2;
    pub const WITH_INVALIDATE: u32 = 4;
    pub const NETWORK_HDR_TYPE: u32 = 64;
    /// Flags that must never be set.
    pub const FORBIDDEN: u32 = !0x47;
}

/// A completion (spec §9.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names of the specification")]
pub struct Cqe {
    pub wr_id: u64,
    pub qp: u64,
    pub opcode: u32,
    pub status: u32,
    pub byte_len: u32,
    pub imm_data: [u8; 4],
    pub src_qp: u32,
    pub wc_flags: u32,
    pub vendor_err: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub port_num: u8,
    pub network_hdr_type: u8,
}

impl Cqe {
    fn parse(bytes: &[u8; CQE as usize]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let half = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        Self {
            wr_id: long(0),
            qp: long(8),
            opcode: word(16),
            status: word(20),
            byte_len: word(24),
            imm_data: bytes[28..32].try_into().unwrap(),
            src_qp: word(32),
            wc_flags: word(36),
            vendor_err: word(40),
            pkey_index: half(44),
            slid: half(46),
            sl: bytes[48],
            port_num: bytes[50],
            network_hdr_type: bytes[57],
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    driver: Driver,
    /// Its handle.
    pub handle: u32,
    /// UAR page of its owner.
    pub uar: u32,
    user: bool,
    ring: DriverRing,
    pages: Vec<u64>,
    directory: Directory,
}

impl Driver {
    /// CREATE_CQ of a process, or of the kernel without context. Rounds the size up as both drivers do.
    ///
    /// # Errors
    /// The command failed.
    pub fn create_cq(&self, context: Option<&Context>, entries: u32) -> Result<Cq, CommandError> {
        self.create_cq_placed(context, entries, Placement::Scattered)
    }

    /// As [`Self::create_cq`], with a choice of pages.
    ///
    /// # Errors
    /// The command failed.
    pub fn create_cq_placed(
        &self,
        context: Option<&Context>,
        entries: u32,
        placement: Placement,
    ) -> Result<Cq, CommandError> {
        let entries = entries.next_power_of_two();
        let memory = &self.0.memory;
        let pages = memory.alloc(1 + (u64::from(entries) * CQE).div_ceil(4096) as usize, placement);
        let directory = memory.directory(&pages);
        let (owner, uar) = context.map_or((0, 0), |context| (context.handle, context.uar));
        let request = Request::new(command_id::CREATE_CQ).u64(16, directory.addr).u32(24, owner);
        match self.execute(&request.u32(28, entries).u32(32, pages.len() as u32)) {
            Ok(response) => {
                assert_eq!(response.u32(20), entries, "the driver uses the returned number as the size");
                let ring = DriverRing::new(memory, pages[0] + 8, &pages[1..], CQE, entries);
                let user = context.is_some();
                Ok(Cq { driver: self.clone(), handle: response.u32(16), uar, user, ring, pages, directory })
            }
            Err(error) => {
                memory.free(&pages);
                memory.free_directory(&directory);
                Err(error)
            }
        }
    }
}

impl Cq {
    /// Returns its ring.
    pub const fn ring(&self) -> &DriverRing {
        &self.ring
    }

    /// Returns all pages, ring state first.
    pub fn pages(&self) -> &[u64] {
        &self.pages
    }

    fn doorbell(&self, bits: u32) {
        self.driver.pci().doorbell(self.uar, UAR_CQ, self.handle | bits);
    }

    /// Takes one completion. If the queue is empty, rings the POLL doorbell and looks once more, as both drivers do.
    ///
    /// # Panics
    /// The completion is invalid for its reader (spec §9.2).
    pub fn poll(&mut self) -> Option<Cqe> {
        let slot = self.ring.has_data().or_else(|| {
            self.doorbell(POLL);
            self.ring.has_data()
        })?;
        let mut bytes = [0; CQE as usize];
        self.ring.memory().read(self.ring.slot(slot), &mut bytes);
        self.ring.consume();
        let cqe = Cqe::parse(&bytes);
        assert_eq!(cqe.wc_flags & wc_flag::FORBIDDEN, 0, "{cqe:?}");
        if self.user {
            assert_eq!(cqe.wc_flags & (wc_flag::WITH_INVALIDATE | wc_flag::NETWORK_HDR_TYPE), 0, "{cqe:?}");
            assert!(matches!(cqe.opcode, 0..=4 | 128 | 129), "{cqe:?}");
        }
        assert_eq!((cqe.qp >> 16, cqe.port_num, cqe.pkey_index, cqe.slid), (0, 1, 0, 0), "{cqe:?}");
        Some(cqe)
    }

    /// Waits for one completion.
    pub fn wait(&mut self) -> Cqe {
        wait_for("completion", || self.poll())
    }

    /// Waits for a number of completions.
    pub fn wait_many(&mut self, count: usize) -> Vec<Cqe> {
        (0..count).map(|_| self.wait()).collect()
    }

    /// Takes up to `max` completions with one load of the indices. Returns their number, and how many of them were not
    /// successful. For benchmarks.
    pub fn reap(&mut self, max: u32) -> (u32, u32) {
        let head = self.ring.cons_head();
        let mask = (self.ring.entries() << 1) - 1;
        let count = (self.ring.prod_tail().wrapping_sub(head) & mask).min(max);
        let mut failed = 0;
        for i in 0..count {
            let slot = head.wrapping_add(i) & (self.ring.entries() - 1);
            failed += u32::from(self.ring.memory().load(self.ring.slot(slot) + 20) != status::SUCCESS);
        }
        if count != 0 {
            self.ring.set_cons_head(head.wrapping_add(count) & mask);
        }
        (count, failed)
    }

    /// Rings the POLL doorbell.
    pub fn ring_poll(&self) {
        self.doorbell(POLL);
    }

    /// Arms the queue for the next completion.
    pub fn arm(&self) {
        self.doorbell(ARM);
    }

    /// Arms the queue for the next solicited completion.
    pub fn arm_solicited(&self) {
        self.doorbell(ARM_SOL);
    }

    /// Removes the completions of a QP, as the drivers do after the QP is destroyed or reset (spec §9.4): the others
    /// are moved up.
    pub fn remove_qp(&mut self, qp_handle: u32) {
        let (tail, head) = (self.ring.prod_tail(), self.ring.cons_head());
        let mask = (self.ring.entries() << 1) - 1;
        let memory = Arc::clone(self.ring.memory());
        let address = |index: u32| self.ring.slot(index & (self.ring.entries() - 1));
        let mut keep = tail;
        let mut at = tail;
        while at != head {
            at = at.wrapping_sub(1) & mask;
            let entry = memory.read_vec(address(at), CQE as usize);
            if u32::from(u16::from_le_bytes([entry[8], entry[9]])) != qp_handle & 0xffff {
                keep = keep.wrapping_sub(1) & mask;
                memory.write(address(keep), &entry);
            }
        }
        self.ring.set_cons_head(keep);
    }

    /// DESTROY_CQ; its pages are freed immediately.
    ///
    /// # Errors
    /// The command failed; the memory is freed nevertheless, as the driver does.
    pub fn destroy(self) -> Result<(), CommandError> {
        let result = self.driver.execute(&Request::new(command_id::DESTROY_CQ).u32(16, self.handle));
        self.driver.0.memory.free(&self.pages);
        self.driver.0.memory.free_directory(&self.directory);
        result.map(drop)
    }
}
