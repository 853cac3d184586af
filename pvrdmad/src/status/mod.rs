//! What the daemon says about itself: as data, and as tables for people.

mod render;
mod report;
mod reporter;

pub use self::report::{
    CaptureReport, ClientReport, CommandReport, DaemonStatus, DeviceReport, MemoryReport, NetworkReport,
};
pub(crate) use self::reporter::Reporter;
