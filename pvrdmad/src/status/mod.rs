//! What the daemon says about itself: as data, and as tables for people.

mod limits;
mod render;
mod report;
mod reporter;
mod show;
mod table;

pub use self::limits::render_limits;
pub(crate) use self::report::by_name;
pub use self::report::{
    CaptureReport, ClientReport, DaemonStatus, DeviceReport, MemoryReport, NetworkReport, NetworkState, NetworkStatus,
    NicReport, WorkerStatus,
};
pub(crate) use self::reporter::{NicReporter, Reporter};
pub use self::show::render_objects;
