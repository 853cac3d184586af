//! Status of the daemon: as data, and as tables.

mod catalogue;
mod classic;
mod failures;
mod former;
mod health;
mod limits;
mod openmetrics;
mod render;
mod report;
mod show;
mod table;
mod traffic;

pub(crate) use self::catalogue::describe_counters;
pub use self::catalogue::{Catalogue, CounterInfo};
pub(crate) use self::classic::classic;
pub use self::failures::render_failures;
pub(crate) use self::former::FormerCounts;
pub use self::limits::render_limits;
pub(crate) use self::report::{AddressReport, ShareReport, by_name, port_word};
pub use self::report::{
    CaptureReport, ClientReport, DaemonStatus, DeviceReport, FlowReport, InterfaceReport, LinkReport, MemoryReport,
    NetworkReport, NetworkState, NetworkStatus, NicReport, WedgedProcess, WorkerStatus,
};
pub use self::show::render_objects;
pub use self::traffic::{QueuePairPeer, QueuePairProgress, QueuePairTraffic};
