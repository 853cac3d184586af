//! Dispatches completions of the host to the queue pairs that they belong to.

use std::sync::Arc;

use pvrdma_base::EndOnPanic;

use crate::adapter::Adapter;
use crate::counters::bump;
use crate::cq::{BATCH, Completions, Cq};
use crate::directory::Directory;
use crate::qp::Qp;

/// Takes all completions that the host has. Returns their number. The caller holds no view of guest memory.
pub(crate) fn drain(cq: &Cq, adapter: &Adapter, qps: &Directory<u32, Qp>) -> usize {
    drain_locked(cq.lock(), adapter, qps, usize::MAX)
}

/// Takes one batch, unless another thread takes completions now.
pub(crate) fn try_drain(cq: &Cq, adapter: &Adapter, qps: &Directory<u32, Qp>) {
    if let Some(completions) = cq.try_lock() {
        drain_locked(completions, adapter, qps, 1);
    }
}

/// Arms the CQ, then drains completions that raced with arming. Returns `true` if there were any.
pub(crate) fn arm_and_drain(cq: &Cq, adapter: &Adapter, qps: &Directory<u32, Qp>) -> bool {
    match cq.arm() {
        Ok(()) => drain(cq, adapter, qps) > 0,
        Err(error) => {
            adapter.log.error(module_path!(), format_args!("a completion queue of the host cannot be armed: {error}"));
            false
        }
    }
}

fn drain_locked(
    mut completions: Completions<'_>,
    adapter: &Adapter,
    qps: &Directory<u32, Qp>,
    batches: usize,
) -> usize {
    let _guard = EndOnPanic::new("the host's completions");
    let mut total = 0;
    // Queue pairs that may continue.
    let mut kicked: Vec<Arc<Qp>> = Vec::new();
    for _ in 0..batches {
        let entries = completions.take().unwrap_or_else(|error| {
            adapter.log.error(module_path!(), format_args!("{error}"));
            &[]
        });
        if entries.is_empty() {
            break;
        }
        total += entries.len();
        let view = adapter.memory.view();
        for wc in entries {
            match qps.get(wc.qp_num) {
                Some(qp) => {
                    if qp.complete(&view, wc) && !kicked.iter().any(|known| Arc::ptr_eq(known, &qp)) {
                        kicked.push(qp);
                    }
                }
                None => bump(&adapter.counters.stale_completions),
            }
        }
        if entries.len() < BATCH {
            break;
        }
    }
    // The CQ is released first: continuing takes locks whose holders may be waiting for the CQ.
    drop(completions);
    for qp in kicked {
        qp.kick();
    }
    total
}
