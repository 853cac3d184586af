//! Queue pairs.

use super::command::{CommandError, Request, command_id};
use super::qp_attr::{Path, QpAttr, state};
use super::wr::{RecvWr, SendWr};
use super::{Cq, Directory, Driver, DriverRing, Pd, Placement, RingFull, Srq};

const UAR_QP: u64 = 0;
const QP_SEND: u32 = 1 << 30;
const QP_RECV: u32 = 1 << 31;

/// Types of queue pairs (appendix A of the specification).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod qp_type {
    pub const GSI: u8 = 1;
    pub const RC: u8 = 2;
    pub const UD: u8 = 4;
}

/// Parameters of a queue pair. The sizes are those of the consumer; they are rounded as the respective driver does.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names of the specification")]
pub struct QpInit<'a> {
    pub pd: &'a Pd,
    pub send_cq: &'a Cq,
    pub recv_cq: &'a Cq,
    pub srq: Option<&'a Srq>,
    pub qp_type: u8,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub signal_all: bool,
    pub placement: Placement,
}

impl<'a> QpInit<'a> {
    /// Returns the parameters of a connection with room for 64 requests of four SGEs in each direction.
    pub const fn rc(pd: &'a Pd, cq: &'a Cq) -> Self {
        Self {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            qp_type: qp_type::RC,
            max_send_wr: 64,
            max_recv_wr: 64,
            max_send_sge: 4,
            max_recv_sge: 4,
            signal_all: false,
            placement: Placement::Scattered,
        }
    }

    /// Returns the parameters of a datagram QP, likewise.
    pub const fn ud(pd: &'a Pd, cq: &'a Cq) -> Self {
        Self { qp_type: qp_type::UD, ..Self::rc(pd, cq) }
    }

    /// Returns the parameters of the connection manager's QP, as the kernel creates it.
    pub const fn gsi(pd: &'a Pd, cq: &'a Cq) -> Self {
        Self {
            qp_type: qp_type::GSI,
            max_send_wr: 128,
            max_recv_wr: 512,
            max_send_sge: 2,
            max_recv_sge: 1,
            signal_all: true,
            ..Self::rc(pd, cq)
        }
    }
}

/// Encoded send element, for [`Qp::post_encoded`].
pub type Encoded = Vec<u8>;

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    driver: Driver,
    /// Handle in doorbells, completions and events.
    pub handle: u32,
    /// QPN.
    pub qpn: u32,
    /// UAR page of its owner.
    pub uar: u32,
    user: bool,
    qp_type: u8,
    send: DriverRing,
    recv: Option<DriverRing>,
    pages: Vec<u64>,
    directory: Directory,
}

impl Driver {
    /// CREATE_QP.
    ///
    /// # Errors
    /// The command failed.
    pub fn create_qp(&self, init: &QpInit<'_>) -> Result<Qp, CommandError> {
        let user = init.pd.is_user();
        // The kernel rounds the number of SGEs up, the user library does not (spec §6.3).
        let sges = |count: u32| if user { count.max(1) } else { count.max(1).next_power_of_two() };
        let shared = init.srq.is_some();
        let (send_wr, send_sge) = (init.max_send_wr.max(1).next_power_of_two(), sges(init.max_send_sge));
        let (recv_wr, recv_sge) =
            if shared { (0, 0) } else { (init.max_recv_wr.max(1).next_power_of_two(), sges(init.max_recv_sge)) };
        let send_stride = (80 + 16 * u64::from(send_sge)).next_power_of_two();
        let recv_stride = (16 + 16 * u64::from(recv_sge)).next_power_of_two();
        let send_pages = (u64::from(send_wr) * send_stride).div_ceil(4096) as usize;
        let recv_pages = (u64::from(recv_wr) * recv_stride).div_ceil(4096) as usize;
        let memory = &self.0.memory;
        let pages = memory.alloc(1 + send_pages + recv_pages, init.placement);
        let directory = memory.directory(&pages);
        let request = Request::new(command_id::CREATE_QP)
            .u64(16, directory.addr)
            .u32(24, init.pd.handle)
            .u32(28, init.send_cq.handle)
            .u32(32, init.recv_cq.handle)
            .u32(36, init.srq.map_or(0, |srq| srq.handle))
            .u32(40, send_wr)
            .u32(44, recv_wr)
            .u32(48, send_sge)
            .u32(52, recv_sge)
            .u32(64, 1)
            .u16(68, pages.len() as u16)
            .u16(70, send_pages as u16)
            .u8(74, init.signal_all.into())
            .u8(75, init.qp_type)
            .u8(76, shared.into());
        let response = match self.execute(&request) {
            Ok(response) => response,
            Err(error) => {
                memory.free(&pages);
                memory.free_directory(&directory);
                return Err(error);
            }
        };
        let qpn = response.u32(16);
        let handle = if self.version() >= 20 { response.u32(20) } else { qpn };
        assert!(handle < self.cap_u32(76) && !(user && handle == 0), "QP handle {handle:#x} (spec §2.5)");
        let (send_area, recv_area) = pages[1..].split_at(send_pages);
        let send = DriverRing::new(memory, pages[0], send_area, send_stride, send_wr);
        let recv = (!shared).then(|| DriverRing::new(memory, pages[0] + 8, recv_area, recv_stride, recv_wr));
        let (driver, uar, qp_type) = (self.clone(), init.pd.uar, init.qp_type);
        Ok(Qp { driver, handle, qpn, uar, user, qp_type, send, recv, pages, directory })
    }
}

impl Qp {
    /// Returns the send ring.
    pub const fn send_ring(&self) -> &DriverRing {
        &self.send
    }

    /// Returns the receive ring.
    ///
    /// # Panics
    /// The QP uses a shared receive queue.
    pub fn recv_ring(&self) -> &DriverRing {
        self.recv.as_ref().expect("receives come from a shared queue")
    }

    /// Returns all pages, ring state first.
    pub fn pages(&self) -> &[u64] {
        &self.pages
    }

    /// MODIFY_QP. After a change to RESET both drivers zero the indices.
    ///
    /// # Errors
    /// The command failed.
    pub fn modify(&mut self, attr: &QpAttr) -> Result<(), CommandError> {
        let request = Request::new(command_id::MODIFY_QP).u32(16, self.handle).u32(20, attr.mask).set(24, &attr.bytes);
        self.driver.execute(&request)?;
        if attr.mask & 1 != 0 && attr.get_state() == state::RESET {
            for ring in [Some(&self.send), self.recv.as_ref()].into_iter().flatten() {
                ring.set_cons_head(0);
                ring.set_prod_tail(0);
            }
        }
        Ok(())
    }

    /// Moves to INIT: connections with access rights, datagram QPs with a Q_Key.
    ///
    /// # Errors
    /// The command failed.
    pub fn to_init(&mut self, access_or_qkey: u32) -> Result<(), CommandError> {
        let attr = QpAttr::to_state(state::INIT);
        self.modify(&match self.qp_type {
            qp_type::RC => attr.port().access(access_or_qkey),
            qp_type::UD => attr.port().qkey(access_or_qkey),
            // The connection manager sends no port.
            _ => attr.set(36, &[0; 2], super::mask::PKEY_INDEX).qkey(access_or_qkey),
        })
    }

    /// Moves a connection to RTR.
    ///
    /// # Errors
    /// The command failed.
    pub fn to_rtr(&mut self, path: &Path) -> Result<(), CommandError> {
        self.modify(&QpAttr::to_state(state::RTR).receive_path(path))
    }

    /// Moves a connection to RTS.
    ///
    /// # Errors
    /// The command failed.
    pub fn to_rts(&mut self, path: &Path) -> Result<(), CommandError> {
        self.modify(&QpAttr::to_state(state::RTS).send_path(path))
    }

    /// Moves a connection from RESET to RTS.
    ///
    /// # Errors
    /// A command failed.
    pub fn connect(&mut self, path: &Path) -> Result<(), CommandError> {
        self.to_init(path.access)?;
        self.to_rtr(path)?;
        self.to_rts(path)
    }

    /// Moves a datagram QP from RESET to RTS.
    ///
    /// # Errors
    /// A command failed.
    pub fn start_datagrams(&mut self, qkey: u32) -> Result<(), CommandError> {
        self.to_init(qkey)?;
        self.modify(&QpAttr::to_state(state::RTR))?;
        self.modify(&QpAttr::to_state(state::RTS).set(24, &[0; 4], super::mask::SQ_PSN))
    }

    /// Moves to ERR.
    ///
    /// # Errors
    /// The command failed.
    pub fn to_error(&mut self) -> Result<(), CommandError> {
        self.modify(&QpAttr::to_state(state::ERR))
    }

    /// Moves to RESET.
    ///
    /// # Errors
    /// The command failed.
    pub fn to_reset(&mut self) -> Result<(), CommandError> {
        self.modify(&QpAttr::to_state(state::RESET))
    }

    /// QUERY_QP.
    ///
    /// # Errors
    /// The command failed.
    pub fn query(&self) -> Result<QpAttr, CommandError> {
        let request = Request::new(command_id::QUERY_QP).u32(16, self.handle).u32(20, 0x1f_ffff);
        Ok(QpAttr { bytes: self.driver.execute(&request)?.bytes(16), mask: 0x1f_ffff })
    }

    /// Publishes sends without a doorbell.
    ///
    /// # Errors
    /// There is no room; the requests before it are published.
    pub fn publish_send(&mut self, requests: &[SendWr]) -> Result<(), RingFull> {
        for request in requests {
            let slot = self.send.has_space().ok_or(RingFull)?;
            self.send.memory().write(self.send.slot(slot), &request.encode(self.user));
            self.send.produce();
        }
        Ok(())
    }

    /// Posts sends, one doorbell for all.
    ///
    /// # Errors
    /// There is no room; the requests before it are published, without a doorbell (spec §13 B5).
    pub fn post_send(&mut self, requests: &[SendWr]) -> Result<(), RingFull> {
        self.publish_send(requests)?;
        self.ring_send();
        Ok(())
    }

    /// Posts as many encoded elements as fit, with one load of the indices and one doorbell. Returns their number. For
    /// benchmarks: element `i` is the one at `i` modulo the number of `elements`.
    pub fn post_encoded(&mut self, elements: &[Encoded], count: u32) -> u32 {
        let count = self.send.fill(elements, count);
        if count != 0 {
            self.ring_send();
        }
        count
    }

    /// As [`Self::post_encoded`], for receives, whose elements are those of [`RecvWr::encode`].
    pub fn post_encoded_recv(&mut self, elements: &[Encoded], count: u32) -> u32 {
        let count = self.recv_ring().fill(elements, count);
        if count != 0 {
            self.ring_recv();
        }
        count
    }

    /// Encodes the element of a request, for [`Self::post_encoded`].
    pub fn encode(&self, request: &SendWr) -> Encoded {
        request.encode(self.user)
    }

    /// Publishes receives without a doorbell.
    ///
    /// # Errors
    /// There is no room; the requests before it are published.
    pub fn publish_recv(&mut self, requests: &[RecvWr]) -> Result<(), RingFull> {
        let ring = self.recv_ring();
        for request in requests {
            let slot = ring.has_space().ok_or(RingFull)?;
            ring.memory().write(ring.slot(slot), &request.encode());
            ring.produce();
        }
        Ok(())
    }

    /// Posts receives, one doorbell for all.
    ///
    /// # Errors
    /// As for [`Self::post_send`].
    pub fn post_recv(&mut self, requests: &[RecvWr]) -> Result<(), RingFull> {
        self.publish_recv(requests)?;
        self.ring_recv();
        Ok(())
    }

    /// Rings the send doorbell.
    #[inline]
    pub fn ring_send(&self) {
        self.driver.pci().doorbell(self.uar, UAR_QP, self.handle | QP_SEND);
    }

    /// Rings the receive doorbell.
    pub fn ring_recv(&self) {
        self.driver.pci().doorbell(self.uar, UAR_QP, self.handle | QP_RECV);
    }

    /// DESTROY_QP; its pages are freed immediately. Its completions stay in their queues, see [`Cq::remove_qp`].
    ///
    /// # Errors
    /// The command failed; the memory is freed nevertheless, as the driver does.
    pub fn destroy(self) -> Result<(), CommandError> {
        let result = self.driver.execute(&Request::new(command_id::DESTROY_QP).u32(16, self.handle));
        self.driver.0.memory.free(&self.pages);
        self.driver.0.memory.free_directory(&self.directory);
        result.map(drop)
    }
}
