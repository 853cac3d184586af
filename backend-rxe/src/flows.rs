//! Traffic of a device's queue pairs, by peer and path.
//!
//! Only requests of the device count, not those of its peers: each flow belongs to the requester. The number of flows
//! of a device is limited. To make room for a new one, the smallest flow that no queue pair uses is merged into the
//! rest, so the sum over all flows never decreases.

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_base::Count;
use pvrdma_verbs_types::Gid;
use serde::{Deserialize, Serialize};

/// Maximum number of separate flows of a device.
const MOST: usize = 32;

/// Path of requests to a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Road {
    /// Local delivery: a copy to a device in the same process.
    Local,
    /// Packets on the wire.
    Wire,
}

impl Road {
    const ALL: [Self; 2] = [Self::Local, Self::Wire];

    /// Returns the name of the path.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Wire => "wire",
        }
    }
}

/// Traffic to and from a peer, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowCount {
    /// Address of the peer. `None`: all flows that are not counted separately.
    pub peer: Option<Gid>,
    /// Path of the requests.
    pub road: Road,
    /// Number of requests that succeeded, and of datagrams.
    pub requests: u64,
    /// Bytes of sends, writes and datagrams.
    pub bytes_out: u64,
    /// Bytes that were read.
    pub bytes_in: u64,
}

/// Counters of a flow.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    requests: Count,
    bytes_out: Count,
    bytes_in: Count,
}

impl Flow {
    #[inline]
    pub(crate) fn add(&self, requests: u64, bytes_out: u64, bytes_in: u64) {
        self.requests.add(requests);
        self.bytes_out.add(bytes_out);
        self.bytes_in.add(bytes_in);
    }

    fn bytes(&self) -> u64 {
        self.bytes_out.get().saturating_add(self.bytes_in.get())
    }

    fn count(&self, peer: Option<Gid>, road: Road) -> FlowCount {
        let Self { requests, bytes_out, bytes_in } = self;
        FlowCount { peer, road, requests: requests.get(), bytes_out: bytes_out.get(), bytes_in: bytes_in.get() }
    }
}

/// The flows of a device.
#[derive(Debug, Default)]
pub(crate) struct FlowTable {
    flows: Mutex<Vec<(Gid, Road, Arc<Flow>)>>,
    /// All other flows, by path.
    others: [Arc<Flow>; 2],
}

impl FlowTable {
    /// Returns the flow to a peer. It stays in the table as long as the result is in use.
    pub(crate) fn flow(&self, peer: Gid, road: Road) -> Arc<Flow> {
        let mut flows = self.flows.lock();
        if let Some((.., flow)) = flows.iter().find(|(known, by, _)| (*known, *by) == (peer, road)) {
            return Arc::clone(flow);
        }
        if flows.len() >= MOST {
            // A flow with one reference is used by the table only, and no thread can get another reference while the
            // table is locked.
            let unused = flows.iter().enumerate().filter(|(_, (.., flow))| Arc::strong_count(flow) == 1);
            let Some((at, _)) = unused.min_by_key(|(_, (.., flow))| flow.bytes()) else { return self.rest(road) };
            let (_, by, gone) = flows.swap_remove(at);
            let count = gone.count(None, by);
            self.rest(by).add(count.requests, count.bytes_out, count.bytes_in);
        }
        let flow = Arc::<Flow>::default();
        flows.push((peer, road, Arc::clone(&flow)));
        flow
    }

    fn rest(&self, road: Road) -> Arc<Flow> {
        let [local, wire] = &self.others;
        Arc::clone(match road {
            Road::Local => local,
            Road::Wire => wire,
        })
    }

    /// Returns all flows with traffic, in descending order of bytes, with the rest at the end.
    pub(crate) fn counts(&self) -> Vec<FlowCount> {
        // The rest is read under the same lock, so that each flow is counted in exactly one of the two.
        let flows = self.flows.lock();
        let mut counts: Vec<_> = flows.iter().map(|(peer, road, flow)| flow.count(Some(*peer), *road)).collect();
        counts.sort_by_key(|count| std::cmp::Reverse(count.bytes_out.saturating_add(count.bytes_in)));
        counts.extend(Road::ALL.map(|road| self.rest(road).count(None, road)));
        counts.retain(|count| count.requests > 0);
        counts
    }
}

/// The flow that a queue pair used last, which is usually that of its next request. Allocated by the first request.
#[derive(Debug, Default)]
pub(crate) struct LastFlow(Option<Box<(Gid, Road, Arc<Flow>)>>);

impl LastFlow {
    /// Returns the flow to this peer.
    #[inline]
    pub(crate) fn to(&mut self, table: &FlowTable, peer: Gid, road: Road) -> &Flow {
        let known = self.0.as_ref().is_some_and(|last| (last.0, last.1) == (peer, road));
        if !known {
            // The old flow is released first: merging it may make the room for the new one.
            self.0 = None;
        }
        &self.0.get_or_insert_with(|| Box::new((peer, road, table.flow(peer, road)))).2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u32) -> Gid {
        let mut gid = Gid::default();
        gid.0[12..].copy_from_slice(&number.to_be_bytes());
        gid
    }

    /// The attack: datagrams to addresses without end. There are no more flows than there may be, those in use stay,
    /// and nothing is lost from the sum.
    #[test]
    fn the_number_of_flows_is_bounded() {
        let table = FlowTable::default();
        let (mut used, mut last) = (LastFlow::default(), LastFlow::default());
        used.to(&table, peer(0), Road::Wire).add(1, 7, 9);
        table.flow(peer(1), Road::Wire).add(1, 1_000_000, 0);
        for number in 2..10_000 {
            last.to(&table, peer(number), if number % 2 == 0 { Road::Local } else { Road::Wire }).add(1, 100, 0);
            assert!(table.flows.lock().len() <= MOST);
        }
        let counts = table.counts();
        assert_eq!(counts.len(), MOST + 2);
        assert_eq!((counts[0].peer, counts[0].bytes_out), (Some(peer(1)), 1_000_000));
        assert!(counts.contains(&FlowCount {
            peer: Some(peer(0)),
            road: Road::Wire,
            requests: 1,
            bytes_out: 7,
            bytes_in: 9
        }));
        assert_eq!(counts.iter().map(|count| count.requests).sum::<u64>(), 10_000);
        assert_eq!(counts.iter().map(|count| count.bytes_out).sum::<u64>(), 7 + 1_000_000 + 9_998 * 100);
    }

    /// When all flows are in use, a further one is counted in the rest, and stays there.
    #[test]
    fn the_number_of_flows_in_use_is_bounded() {
        let table = FlowTable::default();
        let mut held: Vec<_> = (0..1000).map(|number| table.flow(peer(number), Road::Local)).collect();
        held.iter().for_each(|flow| flow.add(1, 1, 0));
        assert_eq!(table.flows.lock().len(), MOST);
        let rest = |table: &FlowTable| table.counts().last().copied().unwrap();
        assert_eq!((rest(&table).peer, rest(&table).requests), (None, 1000 - MOST as u64));
        held.clear();
        table.flow(peer(5000), Road::Local).add(1, 1, 0);
        assert_eq!((rest(&table).requests, table.counts().len()), (1001 - MOST as u64, MOST + 1));
    }
}
