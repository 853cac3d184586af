//! Limits of a device as a table.

use pvrdma_dev::{LimitChange, LimitStatus};

use super::table::table;

/// Renders a row for each limit: the value in force, and the value for the next driver.
pub fn render_limits(limits: &[LimitStatus]) -> String {
    let row = |limit: &LimitStatus| {
        let change = match limit.change {
            LimitChange::Now => "now",
            LimitChange::DriverStart => "driver start",
            LimitChange::NewDevice => "new device",
        };
        vec![limit.name.clone(), change.to_owned(), limit.value.to_string(), limit.next.to_string()]
    };
    table(["limit", "change", "in force", "next driver"], 2, limits.iter().map(row))
}
