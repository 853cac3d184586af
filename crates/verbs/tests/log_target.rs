//! Rate-limited log lines have the module that logs them as target, so that filters apply to them.

use pvrdma_base::{DeviceLog, LogLimit};
use pvrdma_verbs::testing::LogLines;

mod one {
    use super::*;

    pub(super) fn logs(limit: &LogLimit) {
        limit.warn(module_path!(), "subject", format_args!("a line of one"));
    }
}

mod other {
    use super::*;

    pub(super) fn logs(log: &DeviceLog) {
        log.error(module_path!(), format_args!("a line of the other"));
    }
}

#[test]
fn the_target_of_a_limited_line_is_its_module() {
    let lines = LogLines::watch();
    one::logs(&LogLimit::new());
    other::logs(&DeviceLog::new("device"));
    assert_eq!(lines.targets("subject: a line of one"), ["log_target::one"]);
    assert_eq!(lines.targets("device: a line of the other"), ["log_target::other"]);
}
