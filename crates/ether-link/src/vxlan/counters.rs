//! Figures of a tunnel.

use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_verbs::Counter;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of a tunnel.
        #[derive(Default, Debug)]
        pub(super) struct VxlanCounters {
            /// Frames that could not be sent.
            pub(super) lost: AtomicU64,
            $($(#[$doc])* pub(super) $name: AtomicU64,)*
        }

        impl VxlanCounters {
            /// All counts with their names, except what every link counts.
            pub(super) fn list(&self) -> Vec<Counter> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counters! {
    /// Datagrams of somebody who is not a remote.
    vxlan_dropped_sender,
    /// Datagrams that hold no VXLAN header, no VNI or no frame.
    vxlan_dropped_malformed,
    /// Datagrams of another network.
    vxlan_dropped_vni,
    /// Frames that met congestion, and whose senders do not understand the mark.
    vxlan_dropped_congested,
    /// Stations that appeared behind another remote.
    vxlan_moved,
    /// Frames of stations that were not learned because there are too many behind their remote.
    vxlan_not_learned,
}

impl VxlanCounters {
    /// Frames that could not be sent.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Counts frames that could not be sent.
    pub(super) fn add_lost(&self, frames: usize) {
        self.lost.fetch_add(frames as u64, Ordering::Relaxed);
    }
}

/// Counts an event, and logs it the more seldom the more often it happens. Always gives `None`.
pub(super) fn count<T>(counter: &AtomicU64, what: impl FnOnce() -> String) -> Option<T> {
    let times = counter.fetch_add(1, Ordering::Relaxed).saturating_add(1);
    if times.is_power_of_two() {
        log::info!("vxlan: {} ({times} times)", what());
    }
    None
}
