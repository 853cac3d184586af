//! Limits of one device on the host: requests beyond them are refused with an error, and the other device is not
//! affected.

use anyhow::{Result, bail, ensure};
use pvrdma_dev::Limits;
use pvrdma_dev::testing::{CommandError, Path, Placement, QpInit, SendWr, access, status};
use pvrdma_ibverbs::{Ibverbs, IbverbsConfig};
use pvrdma_verbs::testing::gid;

use crate::device_pair::{Side, SideOptions};

const MIB: usize = 1 << 20;
/// Error code for lack of memory or of a table entry.
const ENOMEM: u32 = 12;
const ENOSPC: u32 = 28;
/// More than any limit here.
const MANY: usize = 100;

/// Runs a device that exceeds its limits, next to one that does not.
pub(super) fn check(device: &str) -> Result<()> {
    let backend = Ibverbs::new(IbverbsConfig::new(device).with_max_pinned(4 * MIB as u64))?;
    let few = Limits::default()
        .with_verbs(Limits::default().verbs.with_max_qp(8).with_max_cq(8).with_max_mr(16).with_max_pd(8));
    let plain = SideOptions::new(MIB, Placement::Scattered);
    let mut greedy = Side::new(&backend, 1, &SideOptions { limits: few, ..plain.clone() })?;
    let mut other = Side::new(&backend, 2, &plain)?;
    greedy.qp.connect(&Path::to(gid(2), other.qp.qpn))?;
    other.qp.connect(&Path::to(gid(1), greedy.qp.qpn))?;
    pinned(&greedy)?;
    println!("registered memory: ok");
    bus_addresses(&greedy)?;
    println!("memory of the guest's kernel: ok");
    objects(&greedy)?;
    println!("numbers of objects: ok");
    let (_buffer, mr) = other.driver.registered_buffer(&other.pd, 2 * MIB, access::ALL)?;
    mr.destroy()?;
    write(&mut greedy, &other)?;
    write(&mut other, &greedy)
}

fn write(from: &mut Side, to: &Side) -> Result<()> {
    let whole = from.buffer.sge(&from.mr, 0, MIB);
    from.qp.post_send(&[SendWr::write(1, &[whole], to.buffer.va(), to.mr.rkey)])?;
    let cqe = from.cq.wait();
    ensure!(cqe.status == status::SUCCESS, "a write after all that: {cqe:?}");
    Ok(())
}

/// Creates objects until one is refused, which must be with `error`. Returns the created ones.
fn until_refused<T>(error: u32, mut make: impl FnMut() -> Result<T, CommandError>) -> Result<Vec<T>> {
    let mut made = Vec::new();
    for _ in 0..MANY {
        match make() {
            Ok(object) => made.push(object),
            Err(CommandError::Refused(code)) if code == error => return Ok(made),
            Err(other) => bail!("after {}: {other}", made.len()),
        }
    }
    bail!("{MANY} are not refused")
}

/// Each registration counts, even of the same memory; a released one frees its share.
fn pinned(side: &Side) -> Result<()> {
    for _ in 0..2 {
        let more = until_refused(ENOMEM, || side.driver.reg_mr(&side.pd, &side.buffer, access::ALL))?;
        ensure!(more.len() == 3, "{} registrations of 1 MiB next to the first one", more.len());
        for mr in more {
            mr.destroy()?;
        }
    }
    Ok(())
}

/// Bus addresses are registered on use, so the request is the operation that fails.
fn bus_addresses(side: &Side) -> Result<()> {
    let (pd, mut cq) = (side.driver.create_pd(None)?, side.driver.create_cq(None, 64)?);
    let dma = side.driver.dma_mr(&pd)?;
    let mut qp = side.driver.create_qp(&QpInit::rc(&pd, &cq))?;
    qp.connect(&Path::to(gid(1), qp.qpn))?;
    qp.post_send(&[SendWr::send(1, &[side.buffer.dma_sge(dma.lkey, 0, 8)])])?;
    let cqe = cq.wait();
    ensure!((cqe.wr_id, cqe.status) == (1, status::LOC_PROT), "{cqe:?}");
    qp.destroy()?;
    dma.destroy()?;
    cq.destroy()?;
    pd.destroy()?;
    Ok(())
}

fn objects(side: &Side) -> Result<()> {
    let driver = &side.driver;
    let pds = until_refused(ENOSPC, || driver.create_pd(Some(&side.context)))?;
    let cqs = until_refused(ENOSPC, || driver.create_cq(Some(&side.context), 16))?;
    let qps = until_refused(ENOSPC, || driver.create_qp(&QpInit::rc(&side.pd, &side.cq)))?;
    let small = driver.buffer(4096, 0, Placement::Contiguous);
    let mrs = until_refused(ENOSPC, || driver.reg_mr(&side.pd, &small, access::ALL))?;
    ensure!(!pds.is_empty() && !cqs.is_empty() && !qps.is_empty() && !mrs.is_empty(), "nothing was made at all");
    mrs.into_iter().try_for_each(|mr| mr.destroy())?;
    qps.into_iter().try_for_each(|qp| qp.destroy())?;
    cqs.into_iter().try_for_each(|cq| cq.destroy())?;
    pds.into_iter().try_for_each(|pd| pd.destroy())?;
    Ok(())
}
