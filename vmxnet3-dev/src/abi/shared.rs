//! Area shared by driver and device (`DriverShared`).

use super::command::ConfigPlace;
use super::{byte, le16, le32, le64};

/// Size of the area as defined by revisions 1 to 3, in bytes.
pub(crate) const SHARED_LEN: usize = 720;
/// Magic number at the start of the area.
const MAGIC: u32 = 0xbabe_fee1;
/// Offset of the events, in bytes. Aligned to eight.
pub(crate) const EVENTS_AT: u64 = 696;
/// Offset of a command's parameter, in bytes.
pub(crate) const COMMAND_INFO_AT: u64 = 704;
/// Offset of `uptFeatures`, in bytes.
pub(crate) const FEATURES_AT: u64 = 24;
/// Offset of `rxFilterConf`, in bytes.
pub(crate) const FILTER_AT: u64 = 120;
/// Offset of `rssConfDesc`, in bytes.
pub(crate) const RSS_AT: u64 = 648;

/// Size of the VLAN filter in bytes: one bit for each VLAN ID.
pub(crate) const VLAN_TABLE_LEN: usize = 512;
/// Size of `rxFilterConf`, in bytes.
pub(crate) const FILTER_LEN: usize = 16 + VLAN_TABLE_LEN;

/// Features that the driver requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Features {
    /// Verify checksums of received frames.
    pub(crate) rx_checksum: bool,
    /// Spread received frames over queues.
    pub(crate) rss: bool,
    /// Strip VLAN tags of received frames.
    pub(crate) vlan_strip: bool,
    /// Deliver TCP frames longer than the MTU.
    pub(crate) lro: bool,
}

impl Features {
    /// Bits of all known features.
    pub(crate) const ALL: u32 = 0xf;

    /// Returns the bits of `uptFeatures`.
    pub(crate) fn bits(self) -> u32 {
        let Self { rx_checksum, rss, vlan_strip, lro } = self;
        u32::from(rx_checksum) | u32::from(rss) << 1 | u32::from(vlan_strip) << 2 | u32::from(lro) << 3
    }

    /// Parses `uptFeatures`. Unknown bits are ignored.
    pub(crate) const fn parse(bits: u64) -> Self {
        Self {
            rx_checksum: bits & 1 != 0,
            rss: bits & 1 << 1 != 0,
            vlan_strip: bits & 1 << 2 != 0,
            lro: bits & 1 << 3 != 0,
        }
    }
}

/// Receive mode: frames that the driver accepts (`rxMode`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct RxMode {
    pub(crate) unicast: bool,
    pub(crate) multicast: bool,
    pub(crate) broadcast: bool,
    pub(crate) all_multicast: bool,
    pub(crate) promiscuous: bool,
}

impl RxMode {
    /// Bits of all known modes.
    pub(crate) const ALL: u32 = 0x1f;

    /// Returns the bits of `rxMode`.
    pub(crate) fn bits(self) -> u32 {
        let Self { unicast, multicast, broadcast, all_multicast, promiscuous } = self;
        let low = u32::from(unicast) | u32::from(multicast) << 1 | u32::from(broadcast) << 2;
        low | u32::from(all_multicast) << 3 | u32::from(promiscuous) << 4
    }

    /// Parses `rxMode`. Unknown bits are ignored.
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

/// Receive filter: the mode, the VLAN table, and the location of the multicast table (`RxFilterConf`).
#[derive(Clone, Debug)]
pub(crate) struct FilterConfig {
    pub(crate) mode: RxMode,
    /// Length of the multicast table, in bytes.
    pub(crate) table_len: u16,
    /// Bus address of the multicast table. The driver frees it right after the command.
    pub(crate) table: u64,
    /// One bit for each VLAN ID.
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

/// Interrupt configuration (`IntrConf`). It excludes `intrCtrl`: the driver changes that field without notifying the
/// device, so a device that used it as a mask would lose interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InterruptConfig {
    /// Raising a vector masks it.
    pub(crate) auto_mask: bool,
    /// Vector for events.
    pub(crate) event_vector: u8,
}

/// Snapshot of the shared area. Of its values only the magic number has been validated.
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
    /// Parses the area. Returns `None` if the magic number is wrong.
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
