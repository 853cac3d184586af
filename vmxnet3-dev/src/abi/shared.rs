//! The area that driver and device share (`DriverShared`).

use super::command::ConfigPlace;
use super::{byte, le16, le32, le64};

/// Bytes of the area as far as revisions 1 to 3 know it.
pub(crate) const SHARED_LEN: usize = 720;
/// What it starts with.
const MAGIC: u32 = 0xbabe_fee1;
/// Where the events are, in bytes. Aligned to eight.
pub(crate) const EVENTS_AT: u64 = 696;
/// Where the parameter of a command is, in bytes.
pub(crate) const COMMAND_INFO_AT: u64 = 704;
/// Where `uptFeatures` is, in bytes.
pub(crate) const FEATURES_AT: u64 = 24;
/// Where `rxFilterConf` is, in bytes.
pub(crate) const FILTER_AT: u64 = 120;
/// Where `rssConfDesc` is, in bytes.
pub(crate) const RSS_AT: u64 = 648;

/// Bytes of the VLAN filter: a bit for each VLAN ID.
pub(crate) const VLAN_TABLE_LEN: usize = 512;
/// Bytes of `rxFilterConf`.
pub(crate) const FILTER_LEN: usize = 16 + VLAN_TABLE_LEN;

/// Features that the driver asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Features {
    /// Checksums of received frames are verified.
    pub(crate) rx_checksum: bool,
    /// Received frames are spread over queues.
    pub(crate) rss: bool,
    /// VLAN tags of received frames are stripped.
    pub(crate) vlan_strip: bool,
    /// TCP frames longer than the MTU are taken.
    pub(crate) lro: bool,
}

impl Features {
    /// Parses `uptFeatures`. Bits that are unknown mean nothing.
    pub(crate) const fn parse(bits: u64) -> Self {
        Self {
            rx_checksum: bits & 1 != 0,
            rss: bits & 1 << 1 != 0,
            vlan_strip: bits & 1 << 2 != 0,
            lro: bits & 1 << 3 != 0,
        }
    }
}

/// Which frames the driver wants (`rxMode`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct RxMode {
    pub(crate) unicast: bool,
    pub(crate) multicast: bool,
    pub(crate) broadcast: bool,
    pub(crate) all_multicast: bool,
    pub(crate) promiscuous: bool,
}

impl RxMode {
    /// Parses `rxMode`. Bits that are unknown mean nothing.
    pub(crate) const fn parse(bits: u32) -> Self {
        Self {
            unicast: bits & 1 != 0,
            multicast: bits & 1 << 1 != 0,
            broadcast: bits & 1 << 2 != 0,
            all_multicast: bits & 1 << 3 != 0,
            promiscuous: bits & 1 << 4 != 0,
        }
    }
}

/// Which frames the driver wants, and where the rest of it is (`RxFilterConf`).
#[derive(Clone, Debug)]
pub(crate) struct FilterConfig {
    pub(crate) mode: RxMode,
    /// Bytes of the multicast table.
    pub(crate) table_len: u16,
    /// Its bus address. The driver takes it away right after the command.
    pub(crate) table: u64,
    /// A bit for each VLAN ID.
    pub(crate) vlans: Box<[u8; VLAN_TABLE_LEN]>,
}

impl FilterConfig {
    /// Parses [`FILTER_LEN`] bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let vlans = bytes.get(16..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; VLAN_TABLE_LEN]);
        Self {
            mode: RxMode::parse(le32(bytes, 0)),
            table_len: le16(bytes, 4),
            table: le64(bytes, 8),
            vlans: Box::new(vlans),
        }
    }
}

/// How interrupts work (`IntrConf`). `intrCtrl` is no part of it: the driver changes it without a word, so that a
/// device that took it for a mask would lose an interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InterruptConfig {
    /// A vector that was raised is masked by that.
    pub(crate) auto_mask: bool,
    /// The vector of events.
    pub(crate) event_vector: u8,
}

/// The shared area, as it was at one moment. Numbers are not judged yet, but for the magic.
#[derive(Clone, Debug)]
pub(crate) struct DriverShared {
    pub(crate) features: Features,
    pub(crate) queue_desc: u64,
    pub(crate) queue_desc_len: u32,
    pub(crate) mtu: u32,
    pub(crate) max_rx_buffers: u16,
    pub(crate) tx_queues: u8,
    pub(crate) rx_queues: u8,
    pub(crate) interrupts: InterruptConfig,
    pub(crate) filter: FilterConfig,
    pub(crate) rss: ConfigPlace,
}

impl DriverShared {
    /// Parses the area; `None` without the magic.
    pub(crate) fn parse(bytes: &[u8; SHARED_LEN]) -> Option<Self> {
        (le32(bytes, 0) == MAGIC).then(|| Self {
            features: Features::parse(le64(bytes, 24)),
            queue_desc: le64(bytes, 40),
            queue_desc_len: le32(bytes, 52),
            mtu: le32(bytes, 56),
            max_rx_buffers: le16(bytes, 60),
            tx_queues: byte(bytes, 62),
            rx_queues: byte(bytes, 63),
            interrupts: InterruptConfig { auto_mask: byte(bytes, 80) != 0, event_vector: byte(bytes, 82) },
            filter: FilterConfig::parse(bytes.get(120..).unwrap_or_default()),
            rss: ConfigPlace::parse(bytes.get(648..).unwrap_or_default()),
        })
    }
}
